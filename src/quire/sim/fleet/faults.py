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

    @classmethod
    def in_a_minute(
        cls, deaths: float = 0.0, drains: float = 0.0, joins: float = 2.0, clears: float = 0.0, lost: float = 0.0
    ) -> "FleetFaults":
        """So many of each in a simulated minute, on average: of the whole fleet, but for joins, which are of each empty
        place; and the share of event batches that is lost."""
        if not deaths + drains + clears:
            return cls(lost_events=lost)
        period_s = min(1.0, 60.0 / max(deaths, drains, joins, clears))
        share = period_s / 60.0
        return cls(period_s, deaths * share, drains * share, joins * share, clears * share, lost)
