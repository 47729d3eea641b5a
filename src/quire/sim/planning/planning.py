"""Finds how many members, with how large pools, a load needs to meet an objective.

    members   the least number at the setup's pool             1, 2, 3 ... up to the maximum to try
    pool      the least pool per member at that number         from the longest request's need, four sizes per
                                                               doubling, up to the maximum to try

Both use bisection over runs of the same load. A larger pool or one more member changes evictions and routing, and may
give worse latencies. Bisection alone could therefore stop at an exception. Candidates just above its result are
tried too, and if one fails, the result moves above it. The candidate below each result is run to its end, to report the
cost of one less. A run that cannot meet the objective any more stops early, which does not change any result
(`watched_latencies`).
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from quire.engine.step_profile import StepLoad, StepProfile
from quire.errors import ConfigError
from quire.sim.fleet.member import MemberSize
from quire.sim.fleet.report import FleetReport
from quire.sim.fleet.simulation import FleetConfig, FleetSimulation
from quire.sim.planning.objectives import LatencyObjective, in_words
from quire.sim.planning.watched_latencies import LoadFacts, WatchedLatencies
from quire.workload.workload_request import WorkloadRequest

POOLS_PER_DOUBLING = 4
"""Consecutive pool sizes differ by about a fifth."""
NUM_POOLS_ABOVE = POOLS_PER_DOUBLING
"""Number of larger pools that must also meet the objective before the search ends: up to twice the result."""
NUM_MEMBERS_ABOVE = 2
PROGRESS_EVERY_REQUESTS = 500
IDLE_BELOW = 0.5
"""If members are busy for a smaller share of the time, more members will not help."""

MakeRequests = Callable[[], Iterable[WorkloadRequest]]
SentListener = Callable[[int, int], None]
"""Called with the number of requests sent so far, and the total."""


@dataclass(frozen=True, slots=True)
class PlanSetup:
    """The load, the objective and the fixed settings of a plan."""

    make_requests: MakeRequests
    """Makes the same load again for each run."""
    objective: LatencyObjective
    profile: StepProfile
    size: MemberSize
    """Member size, with the largest pool that a member can have."""
    policy: str = "cost"
    num_gateways: int = 1
    report_age_s: float = 0.0
    seed: int = 0

    def fleet(self, num_members: int, size: MemberSize) -> FleetConfig:
        """Return a fleet with this setup."""
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
class Least:
    """The result of one search, with the cost of one less."""

    value: int | None
    """The least value that meets the objective; None if no tried value does."""
    report: FleetReport | None
    """Report of `value`, or of the largest tried value if `value` is None."""
    one_less: int | None
    """The candidate below `value`, or the largest tried if `value` is None; None if the least candidate is good."""
    report_one_less: FleetReport | None
    trials: tuple[Trial, ...]
    """In ascending order."""
    is_monotone: bool
    """Whether no trial failed above one that met the objective."""


@dataclass(frozen=True, slots=True)
class LeastFound:
    """The result of a search over candidates, as indexes into their list."""

    place: int | None
    """Index of the least good candidate; None if none was found."""
    tried: tuple[tuple[int, bool], ...]
    """Tried indexes in ascending order, each with whether the candidate was good."""

    @property
    def is_monotone(self) -> bool:
        """Whether no tried candidate failed above a good one."""
        was_good = [is_good for _, is_good in self.tried]
        return was_good == sorted(was_good)


@dataclass(frozen=True, slots=True)
class CapacityPlan:
    """The capacity that a load needs."""

    facts: LoadFacts
    least_blocks: int
    """Blocks that the longest request needs."""
    members: Least
    """Search over the number of members, with the setup's pool."""
    pool: Least | None
    """Search over the pool per member, with `num_members`; None if no number of members is enough."""
    num_members: int | None
    num_blocks: int | None
    """The result, with `num_members`; None if no tried capacity is enough."""
    what_limits: tuple[str, ...]
    """Reasons why no tried capacity is enough."""


class Planner:
    """Runs fleets on one load, and remembers their reports so that no run is repeated."""

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
            raise ConfigError("expected a request in the load, got none; keep more of the trace", code="empty_load")
        self._on_progress = on_progress
        self._trials: dict[tuple[int, int], Trial] = {}
        self._complete: dict[tuple[int, MemberSize], FleetReport] = {}
        self.num_runs = 0

    def plan(self, members_max: int, pool_max: int | None = None) -> CapacityPlan:
        """Find the least number of members with the setup's pool, and the least pool with that number. If no number is
        enough, try larger pools up to `pool_max` with `members_max` members."""
        pool = self.setup.size.num_blocks
        least_blocks = self.facts.least_blocks(self.setup.size.block_size)
        largest = max(pool, pool_max or pool)
        if least_blocks > largest:
            nothing = Least(None, None, None, None, (), is_monotone=True)
            reason = f"the longest request needs {least_blocks:,} blocks, a pool has at most {largest:,}"
            return CapacityPlan(self.facts, least_blocks, nothing, None, None, None, (reason,))
        members = self._members(members_max)
        found_pool: Least | None = None
        num_members = members.value
        if num_members is not None:
            found_pool = self._pool(num_members, pool_candidates(least_blocks, pool))
        elif largest > pool:
            found_pool = self._pool(members_max, pool_candidates(max(pool, least_blocks), largest))
            num_members = members_max if found_pool.value is not None else None
        num_blocks = found_pool.value if found_pool is not None else None
        last = (found_pool or members).report if num_members is None else None
        limits = () if last is None else tuple(self._limits(last, members_max, largest))
        return CapacityPlan(self.facts, least_blocks, members, found_pool, num_members, num_blocks, limits)

    def trial(self, num_members: int, num_blocks: int) -> Trial:
        """Test whether a fleet meets the objective; the run stops early if it cannot."""
        key = (num_members, num_blocks)
        if key not in self._trials:
            size = replace(self.setup.size, num_blocks=num_blocks)
            known = self._complete.get((num_members, size))
            report, watched = (known, None) if known else self.watched_run(num_members, size, self.setup.objective)
            is_whole = watched is None or not watched.is_hopeless
            is_met = is_whole and not self.setup.objective.misses(report)
            if is_whole:
                self._complete[num_members, size] = report
            self._trials[key] = Trial(num_members, num_blocks, is_met, report if is_whole else None)
        return self._trials[key]

    def whole(self, num_members: int, num_blocks: int) -> FleetReport:
        """Return the report of a fleet's complete run, whether it meets the objective or not."""
        size = replace(self.setup.size, num_blocks=num_blocks)
        if (num_members, size) not in self._complete:
            self._complete[num_members, size] = self.watched_run(num_members, size)[0]
        return self._complete[num_members, size]

    def far_run(self, num_members: int, num_blocks: int, times: float, speedup: float = 1.0) -> FleetReport | None:
        """Return a fleet's report, or None if it cannot meet the objective with all limits multiplied by `times`."""
        size = replace(self.setup.size, num_blocks=num_blocks)
        known = self._complete.get((num_members, size)) if speedup == 1.0 else None
        if known is not None:
            return known
        what = "" if speedup == 1.0 else f"{speedup:g} times the load"
        report, watched = self.watched_run(num_members, size, self.setup.objective.times(times), speedup, what)
        if watched.is_hopeless:
            return None
        if speedup == 1.0:
            self._complete[num_members, size] = report
        return report

    def watched_run(
        self,
        num_members: int,
        size: MemberSize,
        objective: LatencyObjective | None = None,
        speedup: float = 1.0,
        what: str = "",
    ) -> tuple[FleetReport, WatchedLatencies]:
        """Run until the end, or until the objective cannot be met. Returns the report and the latencies by request."""
        self.num_runs += 1
        watched = WatchedLatencies(self.facts, objective)
        report = FleetSimulation(self.setup.fleet(num_members, size), self._sent(speedup), watched).run()
        came_to = "stopped early, the objective is missed" if watched.is_hopeless else _figures(report)
        fleet = f"{num_members:,} x {size.num_blocks:,} blocks{what and ', '}{what}"
        self._on_run(f"run {self.num_runs}: {fleet}: {came_to}")
        return report, watched

    def _sent(self, speedup: float) -> Iterator[WorkloadRequest]:
        for number, request in enumerate(self.setup.make_requests()):
            if number % PROGRESS_EVERY_REQUESTS == 0:
                self._on_progress(number, self.facts.num_requests)
            yield request if speedup == 1.0 else replace(request, arrival_s=request.arrival_s / speedup)

    def _members(self, members_max: int) -> Least:
        """Double the number of members until it is enough, then bisect."""
        candidates = range(1, members_max + 1)
        doubled = [2**power - 1 for power in range(members_max.bit_length())]
        firsts = doubled if doubled[-1] == members_max - 1 else [*doubled, members_max - 1]
        pool = self.setup.size.num_blocks
        found = least_from_on(
            members_max, lambda place: self.trial(candidates[place], pool).is_met, NUM_MEMBERS_ABOVE, firsts
        )
        return self._least(found, candidates, lambda number: (number, pool))

    def _pool(self, num_members: int, candidates: Sequence[int]) -> Least:
        found = least_from_on(
            len(candidates), lambda place: self.trial(num_members, candidates[place]).is_met, NUM_POOLS_ABOVE
        )
        return self._least(found, candidates, lambda num_blocks: (num_members, num_blocks))

    def _least(self, found: LeastFound, candidates: Sequence[int], fleet: Callable[[int], tuple[int, int]]) -> Least:
        trials = tuple(self.trial(*fleet(candidates[place])) for place, _ in found.tried)
        if found.place is None:
            largest = candidates[found.tried[-1][0]]
            report = self.whole(*fleet(largest))
            return Least(None, report, largest, report, trials, found.is_monotone)
        value = candidates[found.place]
        less = candidates[found.place - 1] if found.place else None
        report_less = None if less is None else self.whole(*fleet(less))
        return Least(value, self.whole(*fleet(value)), less, report_less, trials, found.is_monotone)

    def _limits(self, report: FleetReport, members_max: int, pool_max: int) -> Iterator[str]:
        """Describe the limits that the largest tried fleet missed, and possible remedies."""
        yield f"with {members_max:,} members of {pool_max:,} blocks: " + ", ".join(self.setup.objective.misses(report))
        quickest_s = self.setup.profile.duration_s(StepLoad(1, 0, 0), self.setup.size.speed)
        for limit in self.setup.objective.limits:
            if limit.latency == "tpot" and quickest_s > limit.limit_s:
                yield (
                    f"by the profile a step takes at least {in_words('tpot', quickest_s)}, so no token after the first "
                    "comes sooner, with any number of members"
                )
        busy = f"members are busy {report.utilisation:.0%} of the time"
        if report.utilisation < IDLE_BELOW:
            yield f"{busy}: more members will hardly help; a faster machine, more cache or a lower load will"
        else:
            yield f"{busy}: more members may help; raise the maximum to try"


def _figures(report: FleetReport) -> str:
    ttft, tpot = in_words("ttft", report.ttft_s.p95), in_words("tpot", report.tpot_s.p95)
    return f"TTFT p95 {ttft}, TPOT p95 {tpot}, {report.hit_rate:.1%} reused"


def pool_candidates(least: int, largest: int) -> tuple[int, ...]:
    """Return ascending pool sizes from `least` to `largest` inclusive, `POOLS_PER_DOUBLING` per doubling."""
    pools, power = {largest}, 0
    while (pool := round(least * 2 ** (power / POOLS_PER_DOUBLING))) < largest:
        pools.add(pool)
        power += 1
    return tuple(sorted(pools))


def least_from_on(
    num_candidates: int, is_good: Callable[[int], bool], num_above: int, firsts: Sequence[int] = ()
) -> LeastFound:
    """Find the least candidate that is good together with all larger tried candidates. It takes as many tries as
    bisection, and about `num_above` more.

    `firsts` are indexes that are tried in turn until one is good; by default only the last index.
    """
    tried: dict[int, bool] = {}

    def tries(place: int) -> bool:
        if place not in tried:
            tried[place] = is_good(place)
        return tried[place]

    for place in firsts or (num_candidates - 1,):
        if tries(place):
            break
    else:
        return LeastFound(None, tuple(sorted(tried.items())))
    bad, good = max((one for one in tried if not tried[one]), default=-1), place
    while good - bad > 1:
        middle = (bad + good) // 2
        bad, good = (bad, middle) if tries(middle) else (middle, good)
    while True:
        answer = max((one for one in tried if not tried[one]), default=-1) + 1
        if answer >= num_candidates:
            return LeastFound(None, tuple(sorted(tried.items())))
        wanted = range(answer, min(answer + 1 + num_above, num_candidates))
        if all(tries(one) for one in wanted):
            return LeastFound(answer, tuple(sorted(tried.items())))
