"""The members as their control plane reports them: a table that drops a member without recent reports.

Plain Python with time as a parameter. A control plane keeps one such table where all gateways can read it. No token
passes here: gateways connect to members themselves.
"""

from collections.abc import Callable
from time import monotonic

from quire.fleet.member.status import MemberStatus
from quire.worker.parent.supervisor import State

STALE_S = 10.0
"""A member without a report for so long is not listed any more."""
SETTLES_S = 3.0
"""How long a restarted table lists no member: a part of all members would look like a fleet that shrank."""


class MemberRegistry:
    """All of them."""

    def __init__(self, *, settles_s: float = 0.0, clock: Callable[[], float] = monotonic) -> None:
        """`settles_s`: how long no member is listed, for a table that starts while members are there already."""
        self._clock = clock
        self._listed_from_s = clock() + settles_s
        self._reports: dict[str, tuple[MemberStatus, float]] = {}
        """By the member's name in the control plane; with the time of the report."""

    def report(self, replica: str, status: MemberStatus) -> None:
        """It is there."""
        self._reports[replica] = (status, self._clock())

    def leave(self, replica: str) -> None:
        """It exits, and is no longer listed."""
        self._reports.pop(replica, None)

    def addresses(self) -> list[str]:
        """Of those that gateways should connect to. Empty: not known, and gateways keep those they have."""
        now_s = self._clock()
        self._reports = {name: one for name, one in self._reports.items() if now_s - one[1] <= STALE_S}
        if now_s < self._listed_from_s:
            return []
        listed = [status for _, (status, _) in sorted(self._reports.items())]
        return [status.address for status in listed if status.state != State.DRAINING.value]
