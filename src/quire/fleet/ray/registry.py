"""The table of members that a control plane such as Ray keeps for all gateways, and the desired number of members.

Does not import ray; the clock is a parameter. A member without recent reports is dropped. Tokens do not pass through
the registry, because gateways connect to members directly. The control plane decides how fast and between which bounds
the number of members changes.
"""

from collections.abc import Callable, Iterable
from math import ceil
from time import monotonic

from quire.fleet.member.status import MemberStatus
from quire.worker.parent.supervisor import State

STALE_S = 10.0
"""A member is dropped if it sends no report for this long."""
SETTLE_S = 3.0
"""Time for which a restarted registry lists no members, because an incomplete list would disconnect the others."""
ALMOST = 1e-6
"""Tolerance for the rounding error of float sums, which must not add a member."""


class MemberRegistry:
    """The latest status of each member."""

    def __init__(self, *, settle_s: float = 0.0, clock: Callable[[], float] = monotonic) -> None:
        """List no members for the first `settle_s` seconds: for a registry restarted while members are running."""
        self._clock = clock
        self._listed_from_s = clock() + settle_s
        self._reports: dict[str, tuple[MemberStatus, float]] = {}
        """Status and report time, by the control plane's replica id."""

    def report(self, replica: str, status: MemberStatus) -> None:
        """Record a member's status."""
        self._reports[replica] = (status, self._clock())

    def leave(self, replica: str) -> None:
        """Remove a member that exits."""
        self._reports.pop(replica, None)

    def addresses(self) -> list[str]:
        """Return the addresses of members that are not draining. Empty means unknown: gateways keep their members."""
        now_s = self._clock()
        self._reports = {name: report for name, report in self._reports.items() if now_s - report[1] <= STALE_S}
        if now_s < self._listed_from_s:
            return []
        statuses = [status for _, (status, _) in sorted(self._reports.items())]
        return [status.address for status in statuses if status.state != State.DRAINING.value]


def load_of(status: MemberStatus, num_tokens: int, num_running: int) -> float:
    """Return a member's load, where 1 is full: the larger of its waiting prompt tokens relative to `num_tokens` and its
    running sequences relative to `num_running`."""
    return max(status.num_uncomputed_tokens / num_tokens, status.num_running / num_running)


def desired_members(loads: Iterable[float]) -> int:
    """Return the desired number of members, at least one so that the next request is served."""
    return max(1, ceil(sum(loads) - ALMOST))
