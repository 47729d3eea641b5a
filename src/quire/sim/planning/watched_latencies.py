"""Latencies by request in the order of arrival, so that two runs of one load can be compared in pairs. They are checked
against an objective during the run, so that a run that cannot meet the objective stops early.

Stopping early does not change the result. The number of requests determines how many may exceed a limit, and a request
that has waited longer than the limit has exceeded it even before its first token.
"""

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import isnan, nan

from quire.core.memory.block_table import num_blocks_for
from quire.sim.fleet.report import Latencies
from quire.sim.planning.objectives import LatencyLimit, LatencyObjective
from quire.workload.workload_request import WorkloadRequest


@dataclass(frozen=True, slots=True)
class LoadFacts:
    """Properties of a load, known before it is run."""

    num_requests: int
    num_with_tpot: int
    """Number of requests for more than one output token."""
    longest_tokens: int
    """KV tokens of the longest request; the last output token needs none, because it is never fed."""
    last_arrival_s: float
    num_tenants: int
    priorities: tuple[str, ...]

    @classmethod
    def of(cls, requests: Iterable[WorkloadRequest]) -> "LoadFacts":
        """Return the properties of these requests."""
        num_requests = num_with_tpot = longest_tokens = 0
        last_arrival_s = 0.0
        tenants, priorities = set[str](), set[str]()
        for request in requests:
            num_requests += 1
            num_with_tpot += request.max_tokens > 1
            longest_tokens = max(longest_tokens, len(request.prompt) + max(request.max_tokens - 1, 0))
            last_arrival_s = max(last_arrival_s, request.arrival_s)
            tenants.add(request.tenant)
            priorities.add(request.priority)
        return cls(num_requests, num_with_tpot, longest_tokens, last_arrival_s, len(tenants), tuple(sorted(priorities)))

    def least_blocks(self, block_size: int) -> int:
        """Return the smallest pool in which the longest request can finish."""
        return num_blocks_for(self.longest_tokens, block_size)


class WatchedLatencies(Latencies):
    """Latencies of one run of a load with a known number of requests."""

    def __init__(self, facts: LoadFacts, objective: LatencyObjective | None = None) -> None:
        super().__init__()
        self.is_hopeless = False
        self.ttft_by_arrival_s, self.tpot_by_arrival_s = (array("d", [nan]) * facts.num_requests for _ in range(2))
        """By request, in order of arrival; NaN if unknown."""
        self._arrivals_s = array("d")
        self._places: dict[str, int] = {}
        self._is_judged = objective is not None
        limits = objective.limits if objective is not None else ()
        self._first = [_Overdue(one, facts.num_requests) for one in limits if one.latency == "ttft"]
        self._further = [[one.limit_s, one.num_allowed(facts.num_with_tpot)] for one in limits if one.latency == "tpot"]

    def arrived(self, name: str, now_s: float) -> None:
        super().arrived(name, now_s)
        self._places[name] = len(self._arrivals_s)
        self._arrivals_s.append(now_s)
        self._look(now_s)

    def began(self, name: str, now_s: float) -> None:
        self._look(now_s)
        place = self._places[name]
        if isnan(self.ttft_by_arrival_s[place]):
            self.ttft_by_arrival_s[place] = now_s - self._arrivals_s[place]
        super().began(name, now_s)

    def ended(self, name: str, num_tokens: int, now_s: float) -> None:
        num_known = len(self.tpot_s)
        super().ended(name, num_tokens, now_s)
        place = self._places.pop(name)
        if len(self.tpot_s) > num_known:
            taken_s = self.tpot_by_arrival_s[place] = self.tpot_s[-1]
            for limit in self._further:
                limit[1] -= taken_s > limit[0]
                self.is_hopeless |= limit[1] < 0

    def dropped(self, name: str) -> None:
        """Record that a request was rejected, so that no objective can be met."""
        super().dropped(name)
        del self._places[name]
        self.is_hopeless |= self._is_judged

    def _look(self, now_s: float) -> None:
        for one in self._first:
            self.is_hopeless |= one.is_missed(now_s, self._arrivals_s, self.ttft_by_arrival_s)


class _Overdue:
    """Counts requests that exceeded one limit before their first token. Arrivals are in order of time, so each request
    is checked only once, when its limit has passed."""

    def __init__(self, limit: LatencyLimit, num_requests: int) -> None:
        self._limit_s = limit.limit_s
        self._num_left = limit.num_allowed(num_requests)
        self._next = 0

    def is_missed(self, now_s: float, arrivals_s: Sequence[float], ttft_s: Sequence[float]) -> bool:
        """Whether more requests have exceeded the limit than allowed."""
        at, num_arrived = self._next, len(arrivals_s)
        while at < num_arrived and now_s - arrivals_s[at] > self._limit_s:
            self._num_left -= isnan(ttft_s[at])
            at += 1
        self._next = at
        return self._num_left < 0
