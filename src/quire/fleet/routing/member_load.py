"""Load of the members: uncached prompt tokens that each member was assigned and has not computed yet ("in flight").

    in flight   =   tokens in the member's latest report   +   this gateway's reservations since then

A report counts the assignments of all gateways up to a time, including this gateway's. So reservations before that time
are dropped, and those at or after it are added. Before a member's first report only reservations count.

Tokens that other gateways have assigned since the latest report are unknown; each of them is assumed to assign as many
as this gateway.
"""

from collections import OrderedDict
from math import exp

from quire.errors import InvariantError

RATE_WINDOW_S = 10.0
"""Time constant of the average of this gateway's assignment rate; other gateways are assumed to have the same rate."""


class _MemberLoad:
    """The load of one member."""

    __slots__ = ("as_of_s", "num_reserved_tokens", "reservations")

    def __init__(self) -> None:
        self.as_of_s: float | None = None
        """Time of the latest report; None without a report."""
        self.reservations: OrderedDict[str, tuple[int, float]] = OrderedDict()
        """Reservations that no report includes: request id -> (tokens, time). The oldest first."""
        self.num_reserved_tokens = 0


class MemberLoads:
    """The loads of all members. All operations take amortized constant time."""

    def __init__(self) -> None:
        self.loads: dict[str, _MemberLoad] = {}
        self.in_flight_tokens: dict[str, int] = {}
        """Member -> uncached tokens known to be in flight. Read only."""
        self.member_of: dict[str, str] = {}
        """Request id -> member, for reservations that no report includes."""
        self._newest_s: float | None = None
        """Time of the latest report of any member."""
        self._assigned_tokens = self._assigned_s = 0.0
        """Exponentially decayed sum of the tokens that this gateway reserved, and the time of the sum."""

    def unseen_tokens(self, now_s: float, num_gateways: int) -> int:
        """Estimate the tokens that other gateways have assigned to all members since the latest report."""
        if num_gateways < 2 or self._newest_s is None:
            return 0
        age_s = max(0.0, now_s - self._newest_s)
        return int((num_gateways - 1) * self._assigned_at(now_s) / RATE_WINDOW_S * age_s)

    def _assigned_at(self, now_s: float) -> float:
        return self._assigned_tokens * exp(min(0.0, self._assigned_s - now_s) / RATE_WINDOW_S)

    def join(self, member: str) -> None:
        """Add a member without load."""
        if member in self.loads:
            raise InvariantError(f"join: {member!r} has a load already")
        self.loads[member] = _MemberLoad()
        self.in_flight_tokens[member] = 0

    def leave(self, member: str) -> None:
        """Drop the member and its reservations."""
        load = self.loads.pop(member, None)
        if load is None:
            raise InvariantError(f"leave: {member!r} has no load")
        for request_id in load.reservations:
            del self.member_of[request_id]
        del self.in_flight_tokens[member]

    def reserve(self, request_id: str, member: str, num_tokens: int, now_s: float) -> None:
        """Add a request with `num_tokens` uncached tokens to a member's load."""
        if request_id in self.member_of:
            holder = self.member_of[request_id]
            raise InvariantError(f"reserve: {request_id!r} has a reservation at {holder!r}", code="reserved_twice")
        load = self.loads.get(member)
        if load is None:
            message = f"reserve: {member!r} has no load: it has not joined, or has left"
            raise InvariantError(message, code="member_unknown")
        load.reservations[request_id] = (num_tokens, now_s)
        load.num_reserved_tokens += num_tokens
        self.in_flight_tokens[member] += num_tokens
        self.member_of[request_id] = member
        self._assigned_tokens, self._assigned_s = self._assigned_at(now_s) + num_tokens, now_s

    def release(self, request_id: str) -> None:
        """Remove a reservation: its prompt is computed, or it ended or moved. Idempotent. No effect after a report
        that includes the request; the member's next report removes its tokens."""
        member = self.member_of.pop(request_id, None)
        if member is not None:
            load = self.loads[member]
            num_tokens, _ = load.reservations.pop(request_id)
            load.num_reserved_tokens -= num_tokens
            self.in_flight_tokens[member] -= num_tokens

    def report(self, member: str, num_tokens: int, as_of_s: float) -> None:
        """Record that `num_tokens` uncached tokens were in flight at time `as_of_s`. Reports older than the latest one,
        and reports of members that have left, are ignored."""
        load = self.loads.get(member)
        if load is None or (load.as_of_s is not None and as_of_s < load.as_of_s):
            return
        load.as_of_s = as_of_s
        self._newest_s = as_of_s if self._newest_s is None else max(self._newest_s, as_of_s)
        while load.reservations:
            request_id, (num_own_tokens, reserved_s) = next(iter(load.reservations.items()))
            if reserved_s >= as_of_s:
                break
            del load.reservations[request_id], self.member_of[request_id]
            load.num_reserved_tokens -= num_own_tokens
        self.in_flight_tokens[member] = num_tokens + load.num_reserved_tokens
