"""Curves of a capacity plan: hit rate over pool size, latency over load, and imbalance over the number of members.

A pool is the KV blocks of one member. Runs far beyond capacity would take longest, and their latencies would depend on
the length of the trace. In the curves over load and members, such runs stop when they are certain to exceed ten times
the limits of the objective. The hit rate is meaningful beyond capacity too, so the runs of the pool curve are complete.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from quire.sim.fleet.report import FleetReport
from quire.sim.planning.planning import Planner, pool_candidates

LOAD_FACTORS = (0.5, 0.75, 1.0, 1.25, 1.5, 2.0)
"""Factors on the arrival rate."""
MEMBER_FACTORS = (0.5, 1.0, 1.5, 2.0, 3.0, 4.0)
"""Factors on the number of members that the plan needs."""
NUM_POOLS = 7
STOP_FACTOR = 10.0
"""Runs stop early when they are certain to exceed the limits of the objective times this factor."""


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """One run of a curve."""

    x: float
    num_members: int
    num_blocks: int
    requests_per_s: float
    hit_rate: float | None = None
    ttft_p50_s: float | None = None
    ttft_p95_s: float | None = None
    imbalance: float | None = None
    utilisation: float | None = None
    """All metrics are None if the run was stopped early."""


@dataclass(frozen=True, slots=True)
class PlanCurves:
    """Curves around one fleet, each with one parameter varied."""

    over_pool: tuple[CurvePoint, ...]
    over_load: tuple[CurvePoint, ...]
    over_members: tuple[CurvePoint, ...]


def plan_curves(planner: Planner, num_members: int, num_blocks: int, members_max: int) -> PlanCurves:
    """Return the curves around a fleet of this size."""
    min_blocks = planner.facts.min_blocks(planner.setup.size.block_size)
    pools = pool_candidates(min_blocks, max(planner.setup.size.num_blocks, num_blocks, 2 * min_blocks))
    sizes = {*pools[:: max(1, -(-len(pools) // NUM_POOLS))], pools[-1], num_blocks}
    member_counts = {min(members_max, max(1, round(num_members * factor))) for factor in MEMBER_FACTORS}
    return PlanCurves(
        tuple(_points(planner, ((float(pool), num_members, pool, 1.0) for pool in sorted(sizes)), runs_to_end=True)),
        tuple(_points(planner, ((load, num_members, num_blocks, load) for load in LOAD_FACTORS))),
        tuple(_points(planner, ((float(number), number, num_blocks, 1.0) for number in sorted(member_counts)))),
    )


def _points(
    planner: Planner, fleets: Iterable[tuple[float, int, int, float]], *, runs_to_end: bool = False
) -> Iterator[CurvePoint]:
    requests_per_s = planner.facts.num_requests / (planner.facts.last_arrival_s or 1.0)
    for x, num_members, num_blocks, speedup in fleets:
        if runs_to_end:
            report: FleetReport | None = planner.complete_run(num_members, num_blocks)
        else:
            report = planner.bounded_run(num_members, num_blocks, STOP_FACTOR, speedup)
        metrics: tuple[float, ...] = ()
        if report is not None:
            ttft_s = report.ttft_s
            metrics = report.hit_rate, ttft_s.p50, ttft_s.p95, report.imbalance, report.utilisation
        yield CurvePoint(x, num_members, num_blocks, requests_per_s * speedup, *metrics)
