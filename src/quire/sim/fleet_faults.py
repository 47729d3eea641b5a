"""What goes wrong in a simulated fleet, and how often."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FleetFaults:
    """Chances, at each look; none goes wrong by itself."""

    period_s: float = 0.0
    """Between two looks; 0: nobody looks."""
    death: float = 0.0
    """That one member is killed: what it had goes on elsewhere."""
    drain: float = 0.0
    """That one takes no new work, and leaves when it is done."""
    join: float = 0.0
    """That an empty place is filled."""
    clear: float = 0.0
    """That one forgets its cache."""
    lost_events: float = 0.0
    """That a batch of events of blocks never arrives."""
