"""The members as their control plane reports them: a table that drops a member without recent reports.

Plain Python with time as a parameter. A control plane keeps one such table where all gateways can read it. No token
passes here: gateways connect to members themselves.
"""

from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic

from quire.fleet.member.status import MemberStatus
from quire.worker.parent.supervisor import State

STALE_S = 10.0
"""A member without a report for so long is not listed any more."""
SETTLES_S = 3.0
"""How long a restarted table lists no member: a part of all members would look like a fleet that shrank."""


@dataclass(frozen=True, slots=True)
class MemberRow:
    """A member with a recent report."""

    replica: str
    """Its name in the control plane."""
    node: str
    """The machine it runs on."""
    pid: int
    """Of the member's process there."""
    status: MemberStatus
    silent_s: float = 0.0
    """Since its latest report."""


class MemberRegistry:
    """All of them."""

    def __init__(self, *, settles_s: float = 0.0, clock: Callable[[], float] = monotonic) -> None:
        """`settles_s`: how long no member is listed, for a table that starts while members are there already."""
        self._clock = clock
        self._listed_from_s = clock() + settles_s
        self._rows: dict[str, tuple[MemberRow, float]] = {}

    def report(self, row: MemberRow) -> None:
        """It is there."""
        self._rows[row.replica] = (row, self._clock())

    def leave(self, replica: str) -> None:
        """It exits, and is no longer listed."""
        self._rows.pop(replica, None)

    def rows(self) -> list[MemberRow]:
        """All with a recent report, sorted by name."""
        now_s = self._clock()
        self._rows = {name: one for name, one in self._rows.items() if now_s - one[1] <= STALE_S}
        return [
            MemberRow(row.replica, row.node, row.pid, row.status, now_s - reported_s)
            for _, (row, reported_s) in sorted(self._rows.items())
        ]

    def addresses(self) -> list[str]:
        """Of those that gateways should connect to. Empty: not known, and gateways keep those they have."""
        if self._clock() < self._listed_from_s:
            return []
        return [row.status.address for row in self.rows() if row.status.state != State.DRAINING.value]
