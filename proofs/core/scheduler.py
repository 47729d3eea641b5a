"""`make proof-scheduler`: continuous batching without starvation, leaks, deadlocks or wrong tokens, at scale.

Every run uses new seeds; a failure is printed as the `quire sim` command that replays it.
"""

import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import combinations
from random import Random, SystemRandom
from typing import NamedTuple

from benchmarks.record import say
from proofs.framework.machinery import NUM_PROCESSES, mutants_section, state_machines
from proofs.framework.proof import Proof, run, section
from quire.core.digests import BlockHasher, Namespace
from quire.core.events import Admitted, Finished
from quire.core.inspect import invariants
from quire.core.memory.kv_config import KVMemoryConfig
from quire.core.memory.kv_memory import KVMemory
from quire.core.request import PriorityClass, Request, ResolvedSampling
from quire.core.scheduling.scheduler import Scheduler
from quire.core.scheduling.scheduler_config import SchedulerConfig
from quire.core.scheduling.shares import MIN_SHARE, Shares
from quire.core.scheduling.waiting_queue import OUTPUT_TOKEN_COST, QueueConfig
from quire.core.step import RowResult, StepPlan, StepResult
from quire.errors import CapacityError, QuireError
from quire.sim.server.config import make_config
from quire.sim.server.report import Totals
from quire.sim.server.simulation import Simulation
from tests.mutants import scheduler as scheduler_mutants
from tests.support.core.scheduler_machine import SchedulerMachine
from tests.support.servers.server import Server

HIGH, NORMAL, LOW = PriorityClass.HIGH, PriorityClass.NORMAL, PriorityClass.LOW


# -- simulations -------------------------------------------------------------------------------------------------------


class SimRun(NamedTuple):
    num_requests: int
    totals: Totals
    num_lost: int = 0
    num_divergences: int = 0
    log_digest: str = ""
    failure: str = ""
    """The first violation and the command that replays it; empty without a violation."""


def simulate(seed: int, scenario: str = "chaos") -> SimRun:
    config = make_config(scenario, seed)
    simulation = Simulation(config)
    try:
        report = simulation.run()
    except (QuireError, AssertionError, IndexError, KeyError, ValueError) as error:
        replay = f"quire sim --scenario {scenario} --seed {seed} --requests {config.num_requests}"
        return SimRun(config.num_requests, Totals(), num_divergences=1, failure=f"{replay}: {error!r}")
    totals, num_lost = report.totals, len(simulation.ledger.open)
    num_wrong = len(report.violations) - totals.is_wedged - any(one.startswith("lost") for one in report.violations)
    failure = f"{report.replay}: {report.violations[0]}" if report.violations else ""
    num_requests = len(report.ledger.entries) + totals.num_refused
    return SimRun(num_requests, totals, num_lost, num_wrong, report.log_digest, failure)


def run_simulations(proof: Proof, num_seeds: int, scenario: str = "chaos") -> list[SimRun]:
    """Simulate small servers from start to end on all cores, and print the first violations."""
    seeds = [proof.random.getrandbits(40) for _ in range(num_seeds)]
    with ProcessPoolExecutor(NUM_PROCESSES) as pool:
        runs = list(pool.map(partial(simulate, scenario=scenario), seeds, chunksize=4))
    for failure in [one.failure for one in runs if one.failure][:10]:
        say(f"  {failure}")
    proof.at_least("sim_seeds", len(runs), num_seeds)
    return runs


def report_totals(proof: Proof, runs: Sequence[SimRun]) -> None:
    """Report that no request was lost, no server deadlocked, and no step was idle while requests waited."""
    proof.report("sim_requests", sum(one.num_requests for one in runs))
    proof.equals("wedges", sum(one.totals.is_wedged for one in runs), 0)
    proof.equals("lost", sum(one.num_lost for one in runs), 0)
    proof.equals("idle_waste", sum(one.totals.num_idle_steps for one in runs), 0)


@section("simulations with faults")
def simulations(proof: Proof) -> None:
    runs = run_simulations(proof, proof.sized(quick=30, full=2_000))
    proof.at_least("sim_crashes", sum(one.totals.num_crashes for one in runs), 1)
    proof.report("sim_preemptions", sum(one.totals.num_preemptions for one in runs))
    proof.equals("divergences", sum(one.num_divergences for one in runs), 0)
    report_totals(proof, runs)


@section("replays")
def replays(proof: Proof) -> None:
    num_seeds = proof.sized(quick=5, full=200)
    random = SystemRandom()
    seeds = [random.getrandbits(40) for _ in range(num_seeds)]
    with ProcessPoolExecutor(NUM_PROCESSES) as pool:
        first = [one.log_digest for one in pool.map(simulate, seeds)]
    with ProcessPoolExecutor(NUM_PROCESSES) as pool:
        second = [one.log_digest for one in pool.map(simulate, seeds[::-1])][::-1]
    mismatches = sum(a != b for a, b in zip(first, second, strict=True))
    proof.report("replay_seeds", num_seeds)
    proof.equals("replay_distinct_logs", len(set(first)), num_seeds, "one for each seed")
    proof.equals("replay_mismatches", mismatches, 0)


# -- machines and mutants ----------------------------------------------------------------------------------------------


@section("state machines")
def machines(proof: Proof) -> None:
    state_machines(proof, SchedulerMachine, proof.sized(quick=10_000, full=500_000))


# -- small exact cases -------------------------------------------------------------------------------------------------


@section("a cold prompt shared")
def cold_shared(proof: Proof) -> None:
    server = Server(num_blocks=2048, block_size=32, max_step_tokens=256, max_running=64)
    for _ in range(32):
        server.ask([token % 50 for token in range(1024)], 1)
    server.run()
    proof.at_most("cold_shared_tokens", server.num_computed, 1024 + 32 * 32)


@section("a fork")
def fork_copies(proof: Proof) -> None:
    server = Server(num_blocks=2048, block_size=32, max_step_tokens=256, max_running=64)
    server.ask([token % 50 for token in range(1000)], 4, n=8)
    while len(server.scheduler.running) < 8:
        server.step()
    server.step()
    tables = [sequence.table for sequence in server.scheduler.running if sequence.table is not None]
    shared = len({tuple(table.blocks[: 999 // 32]) for table in tables}) == 1 and len(tables) == 8
    server.run()
    copies = server.memory.stats().num_block_copies
    proof.holds("fork_blocks_shared", shared, "every full block")
    proof.at_most("fork_copies", copies, 8)


@section("a preemption")
def preempted_recompute(proof: Proof) -> None:
    """Preempt at random in a pool with room for all sequences: every full block must be a cache hit afterwards."""
    random = Random(SystemRandom().getrandbits(63))
    num_preemptions = proof.sized(quick=300, full=5_000)
    full_block_tokens = max_partial = num_forced = 0
    while num_forced < num_preemptions:
        server = Server(num_blocks=2000, block_size=8, max_step_tokens=64, max_running=8)
        for _ in range(8):
            server.ask([random.randrange(50) for _ in range(random.randint(1, 60))], random.randint(2, 40))
        while server.scheduler.live:
            for _ in range(random.randint(1, 4)):
                server.step()
            if not server.scheduler.running:
                continue
            victim = server.scheduler.running[-1]
            computed = victim.table.num_computed if victim.table is not None else 0
            server.scheduler.preempt_latest()
            before = server.scheduler.stats.num_recomputed_tokens
            while victim.table is None and victim.request.request_id in server.scheduler.live:
                plan = server.plan()
                item = next((item for item in plan.items if item.sequence_id == victim.sequence_id), None)
                first_recomputed = item.first_position if item is not None else computed // 8 * 8
                full_block_tokens += max(0, computed // 8 * 8 - first_recomputed)
                server.finish(plan)
            max_partial = max(max_partial, server.scheduler.stats.num_recomputed_tokens - before)
            num_forced += 1
    proof.report("preemptions_forced", num_forced)
    proof.equals("preempted_recompute", full_block_tokens, 0, "tokens of full blocks")
    proof.at_most("preempted_recompute_rest", max_partial, 7, "less than one block of 8 each")


# -- under a flood -----------------------------------------------------------------------------------------------------


class Start(NamedTuple):
    order: int
    arrival_s: float
    wait_s: float
    priority: PriorityClass
    tenant: str


class Flood:
    """A scheduler with equal requests and equal steps, whose exact capacity is known; arrivals come at twice that rate.

    A step takes half a second, prefills whole prompts and gives each running sequence one token. So a request runs for
    `NUM_OUTPUT` steps, and the server starts 2 requests per second.
    """

    STEP_S, MAX_RUNNING, NUM_PROMPT, NUM_OUTPUT = 0.5, 8, 8, 8

    def __init__(self, num_seconds: float, num_tenants: int, max_requests: int) -> None:
        self.num_seconds = num_seconds
        self.random = Random(SystemRandom().getrandbits(63))
        self.tenants = [f"tenant{index}" for index in range(num_tenants)]
        self.queue = QueueConfig(max_requests)
        memory = KVMemory(KVMemoryConfig(1024, 4), BlockHasher(bytes(32)))
        config = SchedulerConfig(self.MAX_RUNNING * (self.NUM_PROMPT + 1) + 4, self.MAX_RUNNING, queue=self.queue)
        self.scheduler = Scheduler(config, memory)
        self.starts: list[Start] = []
        self.requests: dict[str, Request] = {}
        self.num_refused = 0
        self.idle_steps = 0

    @property
    def hold_s(self) -> float:
        return self.NUM_OUTPUT * self.STEP_S

    @property
    def rate_per_s(self) -> float:
        return self.MAX_RUNNING / self.hold_s

    def run(self) -> None:
        now_s, next_s, number = 0.0, 0.0, 0
        while now_s < self.num_seconds or self.scheduler.live:
            while next_s <= now_s < self.num_seconds:
                number += 1
                self.submit(number, next_s)
                next_s += self.random.expovariate(2.0 * self.rate_per_s)
            plan = self.scheduler.plan(now_s)
            now_s += self.STEP_S
            if plan.items:
                events = self.scheduler.apply(result_of(plan), now_s)
            else:
                self.idle_steps += bool(self.scheduler.live)
                events = self.scheduler.take_events()
            for event in events:
                if isinstance(event, Admitted):
                    self.start(event)
        invariants.check_at_rest(self.scheduler.memory)

    def submit(self, number: int, arrival_s: float) -> None:
        priority = self.random.choices((HIGH, NORMAL, LOW), (40, 1, 1))[0]
        request = Request(
            request_id=f"r{number}",
            prompt=tuple(self.random.randrange(1 << 30) for _ in range(self.NUM_PROMPT)),
            namespace=Namespace(1, "null", "", "none", 4, "g"),
            arrival_s=arrival_s,
            params=ResolvedSampling(max_tokens=self.NUM_OUTPUT),
            tenant=self.random.choice(self.tenants),
            priority=priority,
        )
        try:
            self.scheduler.submit(request)
        except CapacityError:
            self.num_refused += 1
            return
        self.requests[request.request_id] = request

    def start(self, event: Admitted) -> None:
        request = self.requests.pop(event.request_id)
        self.starts.append(Start(len(self.starts), request.arrival_s, event.wait_s, request.priority, request.tenant))

    def window_s(self, priority: PriorityClass) -> float:
        """Return how much later a request of the most urgent class may arrive and still start first."""
        return self.queue.head_start_s(HIGH) - self.queue.head_start_s(priority)


def result_of(plan: StepPlan) -> StepResult:
    """Return the result of a step as a device without delay: one token for every row that samples."""
    rows = {item.sequence_id: RowResult((7,)) if item.sampling else RowResult() for item in plan.items}
    return StepResult(plan.step, rows)


@section("one tenant under a flood")
def overtaking(proof: Proof) -> None:
    num_seconds = proof.sized(quick=600, full=10_000)
    flood = Flood(num_seconds, num_tenants=1, max_requests=512)
    flood.run()
    breaches = 0
    by_arrival = sorted((start for start in flood.starts if start.priority is HIGH), key=lambda one: one.arrival_s)
    # For each HIGH request, the earliest position in the order of starts among it and all later arrivals.
    earliest: list[int] = [0] * len(by_arrival)
    lowest = 1 << 60
    for index in range(len(by_arrival) - 1, -1, -1):
        lowest = min(lowest, by_arrival[index].order)
        earliest[index] = lowest
    arrivals = [one.arrival_s for one in by_arrival]
    delayed = [start for start in flood.starts if start.priority is not HIGH]
    for start in delayed:
        index = first_index_after(arrivals, start.arrival_s + flood.window_s(start.priority))
        breaches += index < len(earliest) and earliest[index] < start.order
    proof.report("flood_seconds", num_seconds)
    proof.report("flood_started", len(flood.starts))
    proof.at_least("flood_refused", flood.num_refused, 1, "otherwise the queue was never full")
    proof.at_least("flood_low_started", len(delayed), 1)
    proof.equals("overtake_breaches", breaches, 0)
    proof.equals("flood_left_waiting", len(flood.requests), 0)


def first_index_after(times_s: list[float], time_s: float) -> int:
    low, high = 0, len(times_s)
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if times_s[middle] <= time_s else (low, middle)
    return low


def queue_share(tenants: list[str], queue: QueueConfig) -> int:
    """Return how many requests one tenant may have waiting when all tenants have submitted some."""
    shares = Shares(queue.bounds)
    for tenant in tenants:
        shares.request_place(tenant, HIGH.value, 0.0)
    return max(MIN_SHARE, shares.share_of(tenants[0], HIGH.value))


@section("several tenants under a flood")
def waiting_times(proof: Proof) -> None:
    """Check the waiting-time bound of ADR 0007 for several tenants, computed with the figures of this flood."""
    num_tenants, max_requests = 4, 64
    flood = Flood(proof.sized(quick=600, full=10_000), num_tenants, max_requests)
    flood.run()
    running, share = flood.MAX_RUNNING, queue_share(flood.tenants, flood.queue)
    num_later = num_tenants * (num_tenants - 1) * len(PriorityClass) * (3 * running + share)
    num_starts = 4 * (max_requests + running - 1 + num_later)
    breaches, max_share = 0, 0.0
    for start in flood.starts:
        bound_s = flood.window_s(start.priority) + num_starts / flood.rate_per_s + flood.hold_s
        breaches += start.wait_s > bound_s
        max_share = max(max_share, start.wait_s / bound_s)
    proof.report("wait_started", len(flood.starts))
    proof.report("wait_bound_low_s", flood.window_s(LOW) + num_starts / flood.rate_per_s + flood.hold_s)
    proof.report("wait_longest_s", max(start.wait_s for start in flood.starts))
    proof.at_most("wait_over_bound", max_share, 1)
    proof.equals("wait_breaches", breaches, 0)
    proof.equals("wait_idle_steps", flood.idle_steps, 0)


# -- fairness ----------------------------------------------------------------------------------------------------------


@section("fairness")
def fairness(proof: Proof) -> None:
    num_workloads = proof.sized(quick=40, full=1_000)
    random = SystemRandom()
    jobs = [(random.getrandbits(63), 2 if index % 2 else 5) for index in range(num_workloads)]
    with ProcessPoolExecutor(NUM_PROCESSES) as pool:
        ratios = list(pool.map(fairness_gap, jobs, chunksize=8))
    proof.report("fairness_workloads", num_workloads)
    proof.report("fairness_gap_median", statistics.median(ratios))
    proof.at_most("fairness_gap_ratio", max(ratios), 1.0)


def fairness_gap(job: tuple[int, int]) -> float:
    """Return the largest gap in weighted service between two tenants with waiting requests, relative to its bound."""
    seed, num_tenants = job
    random = Random(seed)
    names = [f"t{index}" for index in range(num_tenants)]
    weights = {name: random.choice((1.0, 2.0, 3.0)) for name in names}
    max_running = random.randint(2, 8)
    longest_prompt, longest_output = random.choice((8, 40, 120)), random.choice((4, 20, 60))
    memory = KVMemory(KVMemoryConfig(4000, 4), BlockHasher(bytes(32)))
    queue = QueueConfig(10_000, class_reserve=0.0, tenant_weights=weights)
    config = SchedulerConfig(max_running + 4 + random.choice((0, 16, 100)), max_running, queue=queue)
    scheduler = Scheduler(config, memory)
    costs: dict[str, list[int]] = {name: [] for name in names}
    for index in range(random.randint(40, 120)):
        name = random.choice(names)
        prompt = tuple(random.randrange(1 << 30) for _ in range(random.randint(1, longest_prompt)))
        max_tokens = random.randint(1, longest_output)
        costs[name].append(len(prompt) + OUTPUT_TOKEN_COST * max_tokens)
        namespace = Namespace(1, "null", "", "none", 4, name)
        params = ResolvedSampling(max_tokens=max_tokens)
        scheduler.submit(Request(f"r{index}", prompt, namespace, float(index % 3), params, tenant=name))
    bounds = {name: max_running * max(costs[name], default=0) / weights[name] for name in names}
    max_gap, tenants = 0.0, scheduler.queue.tenants
    gap_ranges: dict[tuple[str, str], tuple[float, float]] = {}
    while scheduler.live:
        waiting = {sequence.request.tenant for sequence in scheduler.queue}
        for pair in combinations(sorted(names), 2):
            if pair[0] in waiting and pair[1] in waiting:
                gap = tenants[pair[0]].service - tenants[pair[1]].service
                low, high = gap_ranges.get(pair, (gap, gap))
                gap_ranges[pair] = (min(low, gap), max(high, gap))
            elif pair in gap_ranges:
                low, high = gap_ranges.pop(pair)
                max_gap = max(max_gap, (high - low) / (bounds[pair[0]] + bounds[pair[1]]))
        scheduler.apply(result_of(scheduler.plan(0.0)), 0.0)
    return max_gap


# -- speed -------------------------------------------------------------------------------------------------------------


class Bench:
    """A scheduler with many decoding and many waiting sequences, timed without a device."""

    def __init__(self, num_running: int, num_waiting: int, max_tokens: int) -> None:
        memory = KVMemory(KVMemoryConfig(num_running * 32 + 4096), BlockHasher(bytes(32)))
        queue = QueueConfig(4 * (num_waiting + num_running), class_reserve=0.0)
        config = SchedulerConfig(num_running + 4096, num_running, queue=queue)
        self.scheduler = Scheduler(config, memory)
        self.random = Random(num_waiting)
        self.number = 0
        self.max_tokens = max_tokens
        for _ in range(num_running):
            self.submit(self.random.randint(200, 288))
        while any(sequence.num_uncomputed > 1 for sequence in self.scheduler.running) or len(self.scheduler.queue):
            self.step()
        for _ in range(num_waiting):
            self.submit(40)

    def submit(self, num_prompt: int) -> None:
        self.number += 1
        self.scheduler.submit(
            Request(
                request_id=f"r{self.number}",
                prompt=tuple(self.random.choices(range(50_000), k=num_prompt)),
                namespace=Namespace(1, "null", "", "none", 32, "g"),
                arrival_s=float(self.number),
                params=ResolvedSampling(max_tokens=self.random.randint(self.max_tokens // 2, self.max_tokens)),
                tenant=f"tenant{self.number % 50}",
                priority=self.random.choice(list(PriorityClass)),
            )
        )

    def step(self) -> float:
        """Return the seconds of `plan` and `apply`. Each finished request is replaced, which is not timed."""
        start = time.perf_counter()
        plan = self.scheduler.plan(0.0)
        planned_s = time.perf_counter() - start
        result = result_of(plan)
        start = time.perf_counter()
        events = self.scheduler.apply(result, 0.0)
        spent_s = planned_s + time.perf_counter() - start
        ended = Counter(type(event) for event in events)[Finished]
        for _ in range(ended if len(self.scheduler.queue) or self.number > 2000 else 0):
            self.submit(40)
        return spent_s


@section("speed")
def speed(proof: Proof) -> None:
    num_rounds = proof.sized(quick=60, full=400)
    decoding = Bench(256, 0, 4_000)
    times = [decoding.step() for _ in range(num_rounds)]
    median_ms = statistics.median(times) * 1e3
    proof.at_most("plan_apply_ms_256", median_ms, 3.0)
    proof.report("plan_apply_ms_256_p90", sorted(times)[int(0.9 * len(times))] * 1e3)
    few, many = Bench(256, 100, 200), Bench(256, 100_000, 200)
    pairs = []
    for index in range(num_rounds):
        # One step of each in alternating order, because the speed of the machine drifts.
        if index % 2:
            pairs.append((few.step(), many.step()))
        else:
            many_s = many.step()
            pairs.append((few.step(), many_s))
    ratio = statistics.median(pair[1] for pair in pairs) / statistics.median(pair[0] for pair in pairs)
    proof.at_most("waiting_scale_ratio", ratio, 1.5)
    proof.report("plan_apply_ms_256_turning_over", statistics.median(pair[0] for pair in pairs) * 1e3)
    thousand = Bench(1000, 0, 4_000)
    proof.report("plan_apply_ms_1000", statistics.median(thousand.step() for _ in range(num_rounds // 4)) * 1e3)


PATHS = ("src/quire/core", "src/quire/sim/server", "src/quire/backends/oracle.py")

if __name__ == "__main__":
    mutants = mutants_section(scheduler_mutants, every=4, quick=10, full=20)
    sys.exit(run("scheduler", sys.modules[__name__], mutants, paths=PATHS))
