"""`quire plan`'s search beside an exhaustive one: small loads of different shapes, every pool of the same grid.

Each load is dice and a shape, the same in every run: what a search answers must not depend on luck.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from random import Random

from benchmarks.record import say
from proofs.framework.proof import Proof, section
from quire.engine.step_profile import StepProfile
from quire.sim.fleet.member import MemberSize
from quire.sim.fleet.simulation import FleetSimulation
from quire.sim.planning.objectives import LatencyObjective
from quire.sim.planning.planning import Planner, PlanSetup, pool_candidates
from quire.workload.arrivals import bursts, poisson, ramp, steady
from quire.workload.workload_request import WorkloadRequest

BLOCK = 16
POOL = 512
MEMBERS_MAX = 6
PROFILE = StepProfile.by_hand(prompt_tokens_per_s=4_000.0, step_s=0.01)
SIZE = MemberSize(POOL, BLOCK, max_step_tokens=128, max_running=32)

Prompts = Callable[[Random], Iterator[tuple[tuple[int, ...], int]]]
"""Endless prompts, and how many tokens each asks for."""


@dataclass(frozen=True)
class _Load:
    """A shape, how it comes, and what is asked of it."""

    name: str
    prompts: Prompts
    arrivals: Callable[[Random], Iterator[float]]
    slo: str
    num_tenants: int = 1


def _new(random: Random, num_tokens: int) -> tuple[int, ...]:
    return (random.getrandbits(30) + 1,) * num_tokens


def _alone(random: Random, shortest: int, longest: int, answer: int) -> Iterator[tuple[tuple[int, ...], int]]:
    """Nobody shares anything."""
    while True:
        yield _new(random, random.randint(shortest, longest)), random.randint(1, answer)


def _shared(
    random: Random, num_systems: int, system: int, own: int, answer: int
) -> Iterator[tuple[tuple[int, ...], int]]:
    """Questions under a few system prompts, or about a few documents."""
    systems = [_new(random, system) for _ in range(num_systems)]
    while True:
        yield random.choice(systems) + _new(random, random.randint(1, own)), random.randint(1, answer)


def _chats(random: Random, num_open: int, turn: int, turns: int, answer: int) -> Iterator[tuple[tuple[int, ...], int]]:
    """Conversations that grow, so many of them open at once."""
    system, said = _new(random, 4 * BLOCK), dict[int, list[tuple[int, ...]]]()
    while True:
        which = random.randrange(num_open)
        said.setdefault(which, [system]).append(_new(random, random.randint(1, turn)))
        yield sum(said[which], ()), random.randint(1, answer)
        if len(said[which]) > turns:
            del said[which]


def _mixed(random: Random) -> Iterator[tuple[tuple[int, ...], int]]:
    """Chats, and now and then a long document."""
    chats, documents = _chats(random, 12, 40, 6, 30), _shared(random, 6, 700, 40, 20)
    while True:
        yield next(documents if random.random() < 0.15 else chats)


def _loop(random: Random) -> Iterator[tuple[tuple[int, ...], int]]:
    """Documents in a circle: a cache that is a little too small has none of them when it is asked."""
    documents = [_new(random, 320) for _ in range(16)]
    while True:
        for document in documents:
            yield document + _new(random, 8), 8


LOADS = (
    _Load(
        "short chats",
        partial(_chats, num_open=30, turn=40, turns=8, answer=30),
        partial(poisson, rate_per_s=14.0),
        "ttft_p95=250ms,tpot_p95=40ms",
    ),
    _Load(
        "long documents",
        partial(_shared, num_systems=10, system=900, own=60, answer=20),
        partial(poisson, rate_per_s=8.0),
        "ttft_p95=400ms",
    ),
    _Load("documents in a circle", _loop, lambda _random: steady(12.0), "ttft_p90=120ms"),
    _Load(
        "one system prompt",
        partial(_shared, num_systems=1, system=600, own=80, answer=40),
        partial(poisson, rate_per_s=25.0),
        "ttft_p95=300ms,tpot_p95=40ms",
    ),
    _Load(
        "bursts",
        partial(_shared, num_systems=4, system=200, own=60, answer=20),
        partial(bursts, rate_per_s=20.0, mean_size=12.0),
        "ttft_p90=800ms",
    ),
    _Load(
        "nothing in common",
        partial(_alone, shortest=20, longest=400, answer=40),
        partial(poisson, rate_per_s=24.0),
        "ttft_p95=400ms,tpot_p99=80ms",
    ),
    _Load(
        "long answers",
        partial(_alone, shortest=10, longest=60, answer=300),
        partial(poisson, rate_per_s=6.0),
        "ttft_p95=100ms,tpot_p90=30ms",
    ),
    _Load("mixed", _mixed, partial(poisson, rate_per_s=24.0), "ttft_p95=400ms"),
    _Load(
        "growing load",
        partial(_chats, num_open=40, turn=30, turns=10, answer=20),
        partial(ramp, from_per_s=5.0, to_per_s=30.0, over_s=15.0),
        "ttft_p95=300ms",
    ),
    _Load(
        "tenants",
        partial(_shared, num_systems=3, system=300, own=50, answer=20),
        partial(poisson, rate_per_s=40.0),
        "ttft_p95=300ms",
        4,
    ),
    _Load(
        "median alone",
        partial(_chats, num_open=60, turn=60, turns=6, answer=20),
        partial(poisson, rate_per_s=14.0),
        "ttft_p50=60ms",
    ),
    _Load(
        "nothing is enough",
        partial(_alone, shortest=300, longest=600, answer=20),
        partial(poisson, rate_per_s=10.0),
        "ttft_p95=100ms",
    ),
)


def _requests(load: _Load, num_requests: int, seed: int) -> Iterator[WorkloadRequest]:
    random = Random(f"{load.name} {seed}")
    moments = load.arrivals(Random(f"moments of {load.name} {seed}"))
    prompts = load.prompts(random)
    for number, (moment_s, (prompt, max_tokens)) in enumerate(
        islice(zip(moments, prompts, strict=False), num_requests)
    ):
        tenant = f"tenant{number % load.num_tenants}"
        yield WorkloadRequest(f"r{number}", moment_s, prompt, max_tokens, 0, tenant)


def _setup(load: _Load, num_requests: int, seed: int = 0) -> PlanSetup:
    requests = partial(_requests, load, num_requests, seed)
    return PlanSetup(requests, LatencyObjective.parse(load.slo), PROFILE, SIZE)


def exhaustive(setup: PlanSetup, num_members: int, pools: tuple[int, ...]) -> int | None:
    """The least pool from which on every one meets the objective: from the largest down to the first that does not,
    for those below it cannot change the answer. Every run goes to its end, and a percentile is counted here."""
    found = None
    for pool in reversed(pools):
        size = replace(setup.size, num_blocks=pool)
        simulation = FleetSimulation(setup.fleet(num_members, size), setup.make_requests())
        report = simulation.run()
        is_met = not report.num_refused and not report.num_lost
        for limit in setup.objective.limits:
            ordered = sorted(getattr(simulation.latencies, f"{limit.latency}_s"))
            is_met &= (
                not ordered or ordered[min(len(ordered) - 1, len(ordered) * limit.percent // 100)] <= limit.limit_s
            )
        if not is_met:
            break
        found = pool
    return found


@section("plan")
def plan(proof: Proof) -> None:
    """The pool at the number of members that the plan says, or at the most there may be where nothing is enough."""
    num_wrong = num_runs = num_exhaustive = num_enough = 0
    loads = LOADS[: proof.sized(quick=3, full=len(LOADS))]
    for load in loads:
        setup = _setup(load, proof.sized(quick=150, full=400))
        planner = Planner(setup)
        told = planner.plan(MEMBERS_MAX)
        pools = pool_candidates(told.min_blocks, POOL)
        exact = exhaustive(setup, told.num_members or MEMBERS_MAX, pools)
        num_wrong += told.num_blocks != exact
        num_enough += exact is not None
        num_runs += planner.num_runs
        num_exhaustive += len(pools) + MEMBERS_MAX
        say(f"  {load.name}: {told.num_members} members of {told.num_blocks} blocks, exhaustive {exact}")
    proof.equals("plan_wrong", num_wrong, 0, f"of {len(loads)} loads, {num_enough} of which some pool is enough for")
    proof.report("plan_runs", num_runs, f"simulations; every pool and number of members would be {num_exhaustive}")
