"""Compares the search of `quire plan` with an exhaustive search over the same pool sizes, on small synthetic loads.

Each load is drawn from a fixed seed: the result of a search must not depend on chance.
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
MAX_MEMBERS = 6
PROFILE = StepProfile.by_hand(prompt_tokens_per_s=4_000.0, step_s=0.01)
SIZE = MemberSize(POOL, BLOCK, max_step_tokens=128, max_running=32)

Prompts = Callable[[Random], Iterator[tuple[tuple[int, ...], int]]]
"""Generates endless pairs of a prompt and the number of tokens to generate for it."""


@dataclass(frozen=True)
class _Load:
    """A synthetic load: its prompts, its arrival times and the latency objective (`slo`) of its plan."""

    name: str
    prompts: Prompts
    arrivals: Callable[[Random], Iterator[float]]
    slo: str
    num_tenants: int = 1


def _random_prompt(random: Random, num_tokens: int) -> tuple[int, ...]:
    return (random.getrandbits(30) + 1,) * num_tokens


def _unrelated(random: Random, shortest: int, longest: int, answer: int) -> Iterator[tuple[tuple[int, ...], int]]:
    """Prompts without a common prefix."""
    while True:
        yield _random_prompt(random, random.randint(shortest, longest)), random.randint(1, answer)


def _with_prefix(
    random: Random, num_systems: int, system: int, own: int, answer: int
) -> Iterator[tuple[tuple[int, ...], int]]:
    """Short questions that begin with one of a few system prompts or documents."""
    systems = [_random_prompt(random, system) for _ in range(num_systems)]
    while True:
        yield random.choice(systems) + _random_prompt(random, random.randint(1, own)), random.randint(1, answer)


def _chat_turns(
    random: Random, num_open: int, turn: int, turns: int, answer: int
) -> Iterator[tuple[tuple[int, ...], int]]:
    """Growing conversations, of which `num_open` are open at once."""
    prefix, chats = _random_prompt(random, 4 * BLOCK), dict[int, list[tuple[int, ...]]]()
    while True:
        chat = random.randrange(num_open)
        chats.setdefault(chat, [prefix]).append(_random_prompt(random, random.randint(1, turn)))
        yield sum(chats[chat], ()), random.randint(1, answer)
        if len(chats[chat]) > turns:
            del chats[chat]


def _mixture(random: Random) -> Iterator[tuple[tuple[int, ...], int]]:
    """Chats, and occasionally a question about a long document."""
    chats, documents = _chat_turns(random, 12, 40, 6, 30), _with_prefix(random, 6, 700, 40, 20)
    while True:
        yield next(documents if random.random() < 0.15 else chats)


def _cycle(random: Random) -> Iterator[tuple[tuple[int, ...], int]]:
    """Documents in a cycle: an LRU cache that is slightly too small never has the next one."""
    documents = [_random_prompt(random, 320) for _ in range(16)]
    while True:
        for document in documents:
            yield document + _random_prompt(random, 8), 8


LOADS = (
    _Load(
        "short chats",
        partial(_chat_turns, num_open=30, turn=40, turns=8, answer=30),
        partial(poisson, rate_per_s=14.0),
        "ttft_p95=250ms,tpot_p95=40ms",
    ),
    _Load(
        "long documents",
        partial(_with_prefix, num_systems=10, system=900, own=60, answer=20),
        partial(poisson, rate_per_s=8.0),
        "ttft_p95=400ms",
    ),
    _Load("documents in a circle", _cycle, lambda _random: steady(12.0), "ttft_p90=120ms"),
    _Load(
        "one system prompt",
        partial(_with_prefix, num_systems=1, system=600, own=80, answer=40),
        partial(poisson, rate_per_s=25.0),
        "ttft_p95=300ms,tpot_p95=40ms",
    ),
    _Load(
        "bursts",
        partial(_with_prefix, num_systems=4, system=200, own=60, answer=20),
        partial(bursts, rate_per_s=20.0, mean_size=12.0),
        "ttft_p90=800ms",
    ),
    _Load(
        "nothing in common",
        partial(_unrelated, shortest=20, longest=400, answer=40),
        partial(poisson, rate_per_s=24.0),
        "ttft_p95=400ms,tpot_p99=80ms",
    ),
    _Load(
        "long answers",
        partial(_unrelated, shortest=10, longest=60, answer=300),
        partial(poisson, rate_per_s=6.0),
        "ttft_p95=100ms,tpot_p90=30ms",
    ),
    _Load("mixed", _mixture, partial(poisson, rate_per_s=24.0), "ttft_p95=400ms"),
    _Load(
        "growing load",
        partial(_chat_turns, num_open=40, turn=30, turns=10, answer=20),
        partial(ramp, from_per_s=5.0, to_per_s=30.0, over_s=15.0),
        "ttft_p95=300ms",
    ),
    _Load(
        "tenants",
        partial(_with_prefix, num_systems=3, system=300, own=50, answer=20),
        partial(poisson, rate_per_s=40.0),
        "ttft_p95=300ms",
        4,
    ),
    _Load(
        "median alone",
        partial(_chat_turns, num_open=60, turn=60, turns=6, answer=20),
        partial(poisson, rate_per_s=14.0),
        "ttft_p50=60ms",
    ),
    _Load(
        "nothing is enough",
        partial(_unrelated, shortest=300, longest=600, answer=20),
        partial(poisson, rate_per_s=10.0),
        "ttft_p95=100ms",
    ),
)


def _requests(load: _Load, num_requests: int, seed: int) -> Iterator[WorkloadRequest]:
    random = Random(f"{load.name} {seed}")
    arrivals = load.arrivals(Random(f"moments of {load.name} {seed}"))
    prompts = load.prompts(random)
    for number, (moment_s, (prompt, max_tokens)) in enumerate(
        islice(zip(arrivals, prompts, strict=False), num_requests)
    ):
        tenant = f"tenant{number % load.num_tenants}"
        yield WorkloadRequest(f"r{number}", moment_s, prompt, max_tokens, 0, tenant)


def _setup(load: _Load, num_requests: int, seed: int = 0) -> PlanSetup:
    requests = partial(_requests, load, num_requests, seed)
    return PlanSetup(requests, LatencyObjective.parse(load.slo), PROFILE, SIZE)


def smallest_pool(setup: PlanSetup, num_members: int, pools: tuple[int, ...]) -> int | None:
    """Return the smallest pool such that it and all larger pools meet the objective, or None. It starts at the largest
    and stops at the first failure. Runs are never cut short; percentiles are computed here, not by the planner."""
    smallest = None
    for pool in reversed(pools):
        size = replace(setup.size, num_blocks=pool)
        simulation = FleetSimulation(setup.fleet(num_members, size), setup.make_requests())
        report = simulation.run()
        is_met = not report.num_refused and not report.num_lost
        for limit in setup.objective.limits:
            values = sorted(getattr(simulation.latencies, f"{limit.latency}_s"))
            is_met &= not values or values[min(len(values) - 1, len(values) * limit.percent // 100)] <= limit.limit_s
        if not is_met:
            break
        smallest = pool
    return smallest


@section("plan")
def plan(proof: Proof) -> None:
    """Compare the pool of each plan with the exhaustive result for as many members (the maximum if no plan exists)."""
    num_wrong = num_runs = num_exhaustive = num_enough = 0
    loads = LOADS[: proof.sized(quick=3, full=len(LOADS))]
    for load in loads:
        setup = _setup(load, proof.sized(quick=150, full=400))
        planner = Planner(setup)
        result = planner.plan(MAX_MEMBERS)
        pools = pool_candidates(result.min_blocks, POOL)
        expected = smallest_pool(setup, result.num_members or MAX_MEMBERS, pools)
        num_wrong += result.num_blocks != expected
        num_enough += expected is not None
        num_runs += planner.num_runs
        num_exhaustive += len(pools) + MAX_MEMBERS
        say(f"  {load.name}: {result.num_members} members of {result.num_blocks} blocks, exhaustive {expected}")
    proof.equals("plan_wrong", num_wrong, 0, f"of {len(loads)} loads; {num_enough} have a large enough pool")
    proof.report("plan_runs", num_runs, f"simulations; every pool and number of members would be {num_exhaustive}")
