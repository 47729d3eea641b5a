"""Finds how many members, with how large pools (KV blocks per member), a load needs to meet an objective.

    members   the smallest number with the setup's pool        1, 2, 3 ... up to the maximum to try
    pool      the smallest pool per member with that number    from the need of the longest request, four sizes per
                                                               doubling, up to the maximum to try

Both searches use bisection over runs of the same load. A larger pool or one more member changes evictions and routing,
and may give worse latencies, so bisection alone could stop at an exception. Therefore candidates just above its result
are tried too, and if one fails, the result moves above it. The candidate below each result (`one_less`) is run to its
end, to report what it misses. A run that can no longer meet the objective stops early, which does not change any result
(`watched_latencies`).
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from quire.engine.step_profile import StepLoad, StepProfile
from quire.errors import ConfigError
from quire.sim.fleet.member import MemberSize
from quire.sim.fleet.report import FleetReport
from quire.sim.fleet.simulation import FleetConfig, FleetSimulation
from quire.sim.planning.objectives import LatencyObjective, latency_text
from quire.sim.planning.watched_latencies import LoadFacts, WatchedLatencies
from quire.workload.workload_request import WorkloadRequest

POOLS_PER_DOUBLING = 4
"""Number of pool sizes tried per doubling; consecutive sizes differ by about a fifth."""
NUM_POOLS_ABOVE = POOLS_PER_DOUBLING
"""Number of larger pools, up to twice the result, that must also meet the objective before the search ends."""
NUM_MEMBERS_ABOVE = 2
PROGRESS_EVERY_REQUESTS = 500
IDLE_BELOW = 0.5
"""If members are busy for a smaller share of the time than this, more members will not help."""

MakeRequests = Callable[[], Iterable[WorkloadRequest]]
SentListener = Callable[[int, int], None]
"""Called with the number of requests sent so far, and the total."""


@dataclass(frozen=True, slots=True)
class PlanSetup:
    """The load, the objective and the fixed settings of a plan."""

    make_requests: MakeRequests
    """Returns the requests of the load, equal for each run."""
    objective: LatencyObjective
    profile: StepProfile
    size: MemberSize
    """Member size, with the largest pool that a member can have."""
    policy: str = "cost"
    num_gateways: int = 1
    report_age_s: float = 0.0
    seed: int = 0

    def fleet(self, num_members: int, size: MemberSize) -> FleetConfig:
        """Return the configuration of a fleet with this setup."""
        return FleetConfig(
            size,
            self.profile,
            self.policy,
            num_members,
            self.num_gateways,
            report_age_s=self.report_age_s,
            seed=self.seed,
        )


@dataclass(frozen=True, slots=True)
class Trial:
    """One fleet size, and whether it meets the objective."""

    num_members: int
    num_blocks: int
    is_met: bool
    report: FleetReport | None
    """None if the run was stopped early."""


@dataclass(frozen=True, slots=True)
class Minimum:
    """The smallest number of members or pool size that meets the objective, and a run with the next smaller one."""

    value: int | None
    """The smallest value that meets the objective; None if no tried value does."""
    report: FleetReport | None
    """Report of `value`, or of the largest tried value if `value` is None."""
    one_less: int | None
    """The candidate below `value`, or the largest tried if `value` is None; None if no candidate is smaller."""
    report_one_less: FleetReport | None
    trials: tuple[Trial, ...]
    """In ascending order."""
    is_monotone: bool
    """Whether no trial failed with a larger value than one that met the objective."""


@dataclass(frozen=True, slots=True)
class MinIndex:
    """The result of a search over candidates, as indexes into their list."""

    index: int | None
    """Index of the smallest good candidate; None if the largest candidate is not good."""
    tried: tuple[tuple[int, bool], ...]
    """Tried indexes in ascending order, each with whether its candidate is good."""

    @property
    def is_monotone(self) -> bool:
        """Whether no tried candidate above a good one failed."""
        results = [is_good for _, is_good in self.tried]
        return results == sorted(results)


@dataclass(frozen=True, slots=True)
class CapacityPlan:
    """The capacity that a load needs."""

    facts: LoadFacts
    min_blocks: int
    """Blocks that the longest request needs."""
    members: Minimum
    """Search over the number of members, with the setup's pool."""
    pool: Minimum | None
    """Search over the pool per member, with `num_members`; None if no number of members is enough."""
    num_members: int | None
    num_blocks: int | None
    """The result, with `num_members`; None if no tried capacity is enough."""
    what_limits: tuple[str, ...]
    """Reasons why no tried capacity is enough."""


class Planner:
    """Runs fleets on one load, and caches their reports so that no run is repeated."""

    def __init__(
        self,
        setup: PlanSetup,
        on_progress: SentListener = lambda _done, _total: None,
        on_run: Callable[[str], None] = lambda _words: None,
    ) -> None:
        self.setup = setup
        self._on_run = on_run
        """Called with a line of text for each run."""
        self.facts = LoadFacts.of(setup.make_requests())
        if not self.facts.num_requests:
            raise ConfigError("expected requests in the load, got none; keep more of the trace", code="empty_load")
        self._on_progress = on_progress
        self._trials: dict[tuple[int, int], Trial] = {}
        self._complete_reports: dict[tuple[int, MemberSize], FleetReport] = {}
        self.num_runs = 0

    def plan(self, members_max: int, pool_max: int | None = None) -> CapacityPlan:
        """Find the smallest number of members with the setup's pool, then the smallest pool with that number. If no
        number is enough, try larger pools up to `pool_max` with `members_max` members."""
        pool = self.setup.size.num_blocks
        min_blocks = self.facts.min_blocks(self.setup.size.block_size)
        max_pool = max(pool, pool_max or pool)
        if min_blocks > max_pool:
            no_search = Minimum(None, None, None, None, (), is_monotone=True)
            reason = f"the longest request needs {min_blocks:,} blocks, a pool has at most {max_pool:,}"
            return CapacityPlan(self.facts, min_blocks, no_search, None, None, None, (reason,))
        member_search = self._search_members(members_max)
        pool_search: Minimum | None = None
        num_members = member_search.value
        if num_members is not None:
            pool_search = self._search_pools(num_members, pool_candidates(min_blocks, pool))
        elif max_pool > pool:
            pool_search = self._search_pools(members_max, pool_candidates(max(pool, min_blocks), max_pool))
            num_members = members_max if pool_search.value is not None else None
        num_blocks = pool_search.value if pool_search is not None else None
        last_report = (pool_search or member_search).report if num_members is None else None
        reasons = () if last_report is None else tuple(self._limit_reasons(last_report, members_max, max_pool))
        return CapacityPlan(self.facts, min_blocks, member_search, pool_search, num_members, num_blocks, reasons)

    def trial(self, num_members: int, num_blocks: int) -> Trial:
        """Test whether a fleet meets the objective; the run stops early if it cannot."""
        key = (num_members, num_blocks)
        if key not in self._trials:
            size = replace(self.setup.size, num_blocks=num_blocks)
            cached = self._complete_reports.get((num_members, size))
            report, watched = (cached, None) if cached else self.watched_run(num_members, size, self.setup.objective)
            is_complete = watched is None or not watched.is_objective_missed
            is_met = is_complete and not self.setup.objective.misses(report)
            if is_complete:
                self._complete_reports[num_members, size] = report
            self._trials[key] = Trial(num_members, num_blocks, is_met, report if is_complete else None)
        return self._trials[key]

    def complete_run(self, num_members: int, num_blocks: int) -> FleetReport:
        """Return the report of a fleet's complete run, whether it meets the objective or not."""
        size = replace(self.setup.size, num_blocks=num_blocks)
        if (num_members, size) not in self._complete_reports:
            self._complete_reports[num_members, size] = self.watched_run(num_members, size)[0]
        return self._complete_reports[num_members, size]

    def bounded_run(self, num_members: int, num_blocks: int, factor: float, speedup: float = 1.0) -> FleetReport | None:
        """Return a fleet's report, or None if it cannot meet the objective with all limits multiplied by `factor`."""
        size = replace(self.setup.size, num_blocks=num_blocks)
        cached = self._complete_reports.get((num_members, size)) if speedup == 1.0 else None
        if cached is not None:
            return cached
        label = "" if speedup == 1.0 else f"{speedup:g} times the load"
        report, watched = self.watched_run(num_members, size, self.setup.objective.scaled(factor), speedup, label)
        if watched.is_objective_missed:
            return None
        if speedup == 1.0:
            self._complete_reports[num_members, size] = report
        return report

    def watched_run(
        self,
        num_members: int,
        size: MemberSize,
        objective: LatencyObjective | None = None,
        speedup: float = 1.0,
        label: str = "",
    ) -> tuple[FleetReport, WatchedLatencies]:
        """Run until the end, or until the objective cannot be met. Returns the report and the latencies by request."""
        self.num_runs += 1
        watched = WatchedLatencies(self.facts, objective)
        report = FleetSimulation(self.setup.fleet(num_members, size), self._timed_requests(speedup), watched).run()
        outcome = "stopped early, the objective is missed" if watched.is_objective_missed else _summary(report)
        fleet = f"{num_members:,} x {size.num_blocks:,} blocks{label and ', '}{label}"
        self._on_run(f"run {self.num_runs}: {fleet}: {outcome}")
        return report, watched

    def _timed_requests(self, speedup: float) -> Iterator[WorkloadRequest]:
        for number, request in enumerate(self.setup.make_requests()):
            if number % PROGRESS_EVERY_REQUESTS == 0:
                self._on_progress(number, self.facts.num_requests)
            yield request if speedup == 1.0 else replace(request, arrival_s=request.arrival_s / speedup)

    def _search_members(self, members_max: int) -> Minimum:
        """Double the number of members until it is enough, then bisect."""
        candidates = range(1, members_max + 1)
        powers = [2**power - 1 for power in range(members_max.bit_length())]
        firsts = powers if powers[-1] == members_max - 1 else [*powers, members_max - 1]
        pool = self.setup.size.num_blocks
        result = smallest_good(
            members_max, lambda index: self.trial(candidates[index], pool).is_met, NUM_MEMBERS_ABOVE, firsts
        )
        return self._minimum(result, candidates, lambda number: (number, pool))

    def _search_pools(self, num_members: int, candidates: Sequence[int]) -> Minimum:
        result = smallest_good(
            len(candidates), lambda index: self.trial(num_members, candidates[index]).is_met, NUM_POOLS_ABOVE
        )
        return self._minimum(result, candidates, lambda num_blocks: (num_members, num_blocks))

    def _minimum(self, search: MinIndex, candidates: Sequence[int], fleet: Callable[[int], tuple[int, int]]) -> Minimum:
        trials = tuple(self.trial(*fleet(candidates[index])) for index, _ in search.tried)
        if search.index is None:
            largest = candidates[search.tried[-1][0]]
            report = self.complete_run(*fleet(largest))
            return Minimum(None, report, largest, report, trials, search.is_monotone)
        value = candidates[search.index]
        one_less = candidates[search.index - 1] if search.index else None
        report_one_less = None if one_less is None else self.complete_run(*fleet(one_less))
        return Minimum(value, self.complete_run(*fleet(value)), one_less, report_one_less, trials, search.is_monotone)

    def _limit_reasons(self, report: FleetReport, members_max: int, pool_max: int) -> Iterator[str]:
        """Yield sentences about the limits that the largest tried fleet missed, and about possible remedies."""
        yield f"with {members_max:,} members of {pool_max:,} blocks: " + ", ".join(self.setup.objective.misses(report))
        min_step_s = self.setup.profile.duration_s(StepLoad(1, 0, 0), self.setup.size.speed)
        for limit in self.setup.objective.limits:
            if limit.latency == "tpot" and min_step_s > limit.limit_s:
                yield (
                    f"by the profile a step takes at least {latency_text('tpot', min_step_s)}, and so does every token "
                    "after the first, with any number of members"
                )
        usage = f"members are busy {report.utilisation:.0%} of the time"
        if report.utilisation < IDLE_BELOW:
            yield f"{usage}: more members will hardly help; a faster machine, more cache or a lower load will"
        else:
            yield f"{usage}: more members may help; raise the maximum to try"


def _summary(report: FleetReport) -> str:
    ttft, tpot = latency_text("ttft", report.ttft_s.p95), latency_text("tpot", report.tpot_s.p95)
    return f"TTFT p95 {ttft}, TPOT p95 {tpot}, {report.hit_rate:.1%} reused"


def pool_candidates(smallest: int, largest: int) -> tuple[int, ...]:
    """Return ascending pool sizes from `smallest` to `largest` inclusive, `POOLS_PER_DOUBLING` per doubling."""
    pools, power = {largest}, 0
    while (pool := round(smallest * 2 ** (power / POOLS_PER_DOUBLING))) < largest:
        pools.add(pool)
        power += 1
    return tuple(sorted(pools))


def smallest_good(
    num_candidates: int, is_good: Callable[[int], bool], num_above: int, firsts: Sequence[int] = ()
) -> MinIndex:
    """Find the smallest candidate that is good together with all larger tried candidates. Tries as many candidates as
    bisection does, and about `num_above` more.

    `firsts` are indexes that are tried in order until one is good; by default only the last index.
    """
    tried: dict[int, bool] = {}

    def try_index(index: int) -> bool:
        if index not in tried:
            tried[index] = is_good(index)
        return tried[index]

    for index in firsts or (num_candidates - 1,):
        if try_index(index):
            break
    else:
        return MinIndex(None, tuple(sorted(tried.items())))
    bad_index, good_index = max((tried_index for tried_index in tried if not tried[tried_index]), default=-1), index
    while good_index - bad_index > 1:
        middle = (bad_index + good_index) // 2
        bad_index, good_index = (bad_index, middle) if try_index(middle) else (middle, good_index)
    while True:
        result = max((index for index in tried if not tried[index]), default=-1) + 1
        if result >= num_candidates:
            return MinIndex(None, tuple(sorted(tried.items())))
        candidates = range(result, min(result + 1 + num_above, num_candidates))
        if all(try_index(index) for index in candidates):
            return MinIndex(result, tuple(sorted(tried.items())))
