"""Uncached tokens in flight: what each member has been assigned and has not computed yet.

    in flight   =   what the member reported last   +   own reservations made since

A report counts what all gateways have assigned to the member up to a moment, own requests among them; so reservations
made before that moment are forgotten, and those made at it or later are added. Without a report only those count.

What other gateways have assigned since the latest report is not known here, but estimated: about as much as this
gateway has.
"""

from collections import OrderedDict
from math import exp

from quire.errors import InvariantError

RATE_OVER_S = 10.0
"""Averages the own assignment rate over so long: other gateways are expected to have the same."""


class _MemberLoad:
    """One member's part."""

    __slots__ = ("as_of_s", "num_since_tokens", "since")

    def __init__(self) -> None:
        self.as_of_s: float | None = None
        """Which moment the report is of; None: there is none."""
        self.since: OrderedDict[str, tuple[int, float]] = OrderedDict()
        """Own reservations that no report counts: request -> tokens, and when it was made. The oldest first."""
        self.num_since_tokens = 0


class MemberLoads:
    """Of all members. Every operation takes amortized constant time."""

    def __init__(self) -> None:
        self.loads: dict[str, _MemberLoad] = {}
        self.in_flight_tokens: dict[str, int] = {}
        """Member -> what it still has to compute, as far as is known here. Read only."""
        self.member_of: dict[str, str] = {}
        """Request -> member, of the reservations that no report counts."""
        self._newest_s: float | None = None
        """The latest moment that any report is of."""
        self._assigned_tokens = self._assigned_s = 0.0
        """Tokens reserved here, decayed by age, and as of when."""

    def unseen_tokens(self, now_s: float, num_gateways: int) -> int:
        """An estimate of what the other gateways have assigned to any member since the latest report."""
        if num_gateways < 2 or self._newest_s is None:
            return 0
        age_s = max(0.0, now_s - self._newest_s)
        return int((num_gateways - 1) * self._assigned_at(now_s) / RATE_OVER_S * age_s)

    def _assigned_at(self, now_s: float) -> float:
        return self._assigned_tokens * exp(min(0.0, self._assigned_s - now_s) / RATE_OVER_S)

    def join(self, member: str) -> None:
        """A member that has nothing to compute."""
        if member in self.loads:
            raise InvariantError(f"join: {member!r} has a load already")
        self.loads[member] = _MemberLoad()
        self.in_flight_tokens[member] = 0

    def leave(self, member: str) -> None:
        """Drop the member and its reservations."""
        load = self.loads.pop(member, None)
        if load is None:
            raise InvariantError(f"leave: {member!r} has no load")
        for request_id in load.since:
            del self.member_of[request_id]
        del self.in_flight_tokens[member]

    def reserve(self, request_id: str, member: str, num_tokens: int, now_s: float) -> None:
        """The member gets a request of which it has to compute so many tokens."""
        if request_id in self.member_of:
            place = self.member_of[request_id]
            raise InvariantError(f"reserve: {request_id!r} has a reservation at {place!r}", code="reserved_twice")
        load = self.loads.get(member)
        if load is None:
            sentence = f"reserve: {member!r} has no load: it has not joined, or has left"
            raise InvariantError(sentence, code="member_unknown")
        load.since[request_id] = (num_tokens, now_s)
        load.num_since_tokens += num_tokens
        self.in_flight_tokens[member] += num_tokens
        self.member_of[request_id] = member
        self._assigned_tokens, self._assigned_s = self._assigned_at(now_s) + num_tokens, now_s

    def release(self, request_id: str) -> None:
        """Its prompt is computed, or it ended or moved. Idempotent; what a report counts the next report takes off."""
        member = self.member_of.pop(request_id, None)
        if member is not None:
            load = self.loads[member]
            num_tokens, _ = load.since.pop(request_id)
            load.num_since_tokens -= num_tokens
            self.in_flight_tokens[member] -= num_tokens

    def report(self, member: str, num_tokens: int, as_of_s: float) -> None:
        """So many uncached tokens were in flight there at that moment. Of reports that overtook each other the latest
        moment counts; one of a member that has left is ignored."""
        load = self.loads.get(member)
        if load is None or (load.as_of_s is not None and as_of_s < load.as_of_s):
            return
        load.as_of_s = as_of_s
        self._newest_s = as_of_s if self._newest_s is None else max(self._newest_s, as_of_s)
        while load.since:
            request_id, (num_own_tokens, made_s) = next(iter(load.since.items()))
            if made_s >= as_of_s:
                break
            del load.since[request_id], self.member_of[request_id]
            load.num_since_tokens -= num_own_tokens
        self.in_flight_tokens[member] = num_tokens + load.num_since_tokens
