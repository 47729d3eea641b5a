"""Who is a member, as those who look after members say it: a table that forgets whoever is not heard of any more.

Plain Python with time handed in. Some control plane keeps one such table where all gateways can ask it. No token passes
here: gateways speak with members themselves.
"""

from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic

from quire.fleet.member.status import MemberStatus
from quire.worker.parent.supervisor import State

STALE_S = 10.0
"""Nobody has said anything of a member for so long: it is not listed any more."""
SETTLES_S = 3.0
"""How long a table that had to begin anew lists nobody: a part of all members would look like a fleet that shrank."""


@dataclass(frozen=True, slots=True)
class MemberRow:
    """A member that was heard of lately."""

    replica: str
    """What its control plane calls it."""
    node: str
    """The machine it runs on."""
    pid: int
    """Of the member's process there."""
    status: MemberStatus
    silent_s: float = 0.0
    """Since it was heard of."""


class MemberRegistry:
    """All of them."""

    def __init__(self, *, settles_s: float = 0.0, clock: Callable[[], float] = monotonic) -> None:
        """`settles_s`: how long nobody is listed, for one that begins while members are there already."""
        self._clock = clock
        self._listed_from_s = clock() + settles_s
        self._rows: dict[str, tuple[MemberRow, float]] = {}

    def report(self, row: MemberRow) -> None:
        """It is there."""
        self._rows[row.replica] = (row, self._clock())

    def leave(self, replica: str) -> None:
        """It ends, and is not to be asked any more."""
        self._rows.pop(replica, None)

    def rows(self) -> list[MemberRow]:
        """All that were heard of lately, in the order of their names."""
        now_s = self._clock()
        self._rows = {name: one for name, one in self._rows.items() if now_s - one[1] <= STALE_S}
        return [
            MemberRow(row.replica, row.node, row.pid, row.status, now_s - heard_s)
            for _, (row, heard_s) in sorted(self._rows.items())
        ]

    def addresses(self) -> list[str]:
        """Of those that gateways should have. Empty: not known, and gateways stay with those they have."""
        if self._clock() < self._listed_from_s:
            return []
        return [row.status.address for row in self.rows() if row.status.state != State.DRAINING.value]
