"""Latencies by request in the order of arrival, so that two runs of one load can be compared in pairs. They are checked
against an objective during the run, so that a run that cannot meet the objective stops early.

Stopping early does not change whether a run meets the objective: the number of requests determines how many may exceed
a limit, and a request that has waited longer than the TTFT limit has exceeded it even before its first token.
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
    """Properties of a load, computed before the first run."""

    num_requests: int
    num_with_tpot: int
    """Number of requests for more than one output token, which have a TPOT."""
    longest_tokens: int
    """Tokens in the KV cache of the longest request: all but the last output token, which is never fed to the model."""
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

    def min_blocks(self, block_size: int) -> int:
        """Return the smallest pool in which the longest request can finish."""
        return num_blocks_for(self.longest_tokens, block_size)


class WatchedLatencies(Latencies):
    """Latencies of one run of a load with a known number of requests."""

    def __init__(self, facts: LoadFacts, objective: LatencyObjective | None = None) -> None:
        super().__init__()
        self.is_objective_missed = False
        self.ttft_by_arrival_s, self.tpot_by_arrival_s = (array("d", [nan]) * facts.num_requests for _ in range(2))
        """Latency of each request, in order of arrival; NaN if it has none (yet)."""
        self._arrivals_s = array("d")
        self._indexes: dict[str, int] = {}
        self._has_objective = objective is not None
        limits = objective.limits if objective is not None else ()
        self._ttfts = [_TtftLimit(limit, facts.num_requests) for limit in limits if limit.latency == "ttft"]
        self._tpots = [[one.limit_s, one.num_allowed(facts.num_with_tpot)] for one in limits if one.latency == "tpot"]

    def record_arrival(self, name: str, now_s: float) -> None:
        super().record_arrival(name, now_s)
        self._indexes[name] = len(self._arrivals_s)
        self._arrivals_s.append(now_s)
        self._check_ttft(now_s)

    def record_first_token(self, name: str, now_s: float) -> None:
        self._check_ttft(now_s)
        index = self._indexes[name]
        if isnan(self.ttft_by_arrival_s[index]):
            self.ttft_by_arrival_s[index] = now_s - self._arrivals_s[index]
        super().record_first_token(name, now_s)

    def record_end(self, name: str, num_tokens: int, now_s: float) -> None:
        num_tpot = len(self.tpot_s)
        super().record_end(name, num_tokens, now_s)
        index = self._indexes.pop(name)
        if len(self.tpot_s) > num_tpot:
            tpot_s = self.tpot_by_arrival_s[index] = self.tpot_s[-1]
            for limit in self._tpots:
                limit[1] -= tpot_s > limit[0]
                self.is_objective_missed |= limit[1] < 0

    def record_rejection(self, name: str) -> None:
        """Record that a request was rejected, so that no objective can be met."""
        super().record_rejection(name)
        del self._indexes[name]
        self.is_objective_missed |= self._has_objective

    def _check_ttft(self, now_s: float) -> None:
        for limit in self._ttfts:
            self.is_objective_missed |= limit.check(now_s, self._arrivals_s, self.ttft_by_arrival_s)


class _TtftLimit:
    """Counts requests that exceeded one TTFT limit. Requests arrive in order of time, so each one is checked only once,
    as soon as the limit after its arrival has passed."""

    def __init__(self, limit: LatencyLimit, num_requests: int) -> None:
        self._limit_s = limit.limit_s
        self._num_allowed = limit.num_allowed(num_requests)
        self._next_index = 0

    def check(self, now_s: float, arrivals_s: Sequence[float], ttft_s: Sequence[float]) -> bool:
        """Check the requests whose limit has passed. Returns whether more have exceeded the limit than allowed."""
        index, num_arrived = self._next_index, len(arrivals_s)
        while index < num_arrived and now_s - arrivals_s[index] > self._limit_s:
            self._num_allowed -= isnan(ttft_s[index])
            index += 1
        self._next_index = index
        return self._num_allowed < 0
