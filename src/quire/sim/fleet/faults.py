"""Faults of a simulated fleet, and their rates."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FleetFaults:
    """Probabilities per check; all zero: no faults."""

    period_s: float = 0.0
    """Time between two checks; 0: no checks."""
    death: float = 0.0
    """One member is killed; its requests continue on others."""
    drain: float = 0.0
    """One member takes no new work, and leaves when it is done."""
    join: float = 0.0
    """An empty slot gets a new member."""
    clear: float = 0.0
    """One member's cache is cleared."""
    lost_events: float = 0.0
    """A batch of block events is lost."""

    @classmethod
    def in_a_minute(
        cls, deaths: float = 0.0, drains: float = 0.0, joins: float = 2.0, clears: float = 0.0, lost: float = 0.0
    ) -> "FleetFaults":
        """Mean numbers per simulated minute of the whole fleet (joins: of each empty slot), and the share of event
        batches that is lost."""
        if not deaths + drains + clears:
            return cls(lost_events=lost)
        period_s = min(1.0, 60.0 / max(deaths, drains, joins, clears))
        share = period_s / 60.0
        return cls(period_s, deaths * share, drains * share, joins * share, clears * share, lost)
