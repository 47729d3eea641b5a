"""The simulator beside the real server: the same requests, at the same moments, through both.

Every setting is run for real in its turn: `quire serve` of SmolLM2 with its worker, asked over HTTP at the moments of a
public trace, its lengths scaled. Steps are timed between the runs; the simulator gets a profile made of those just
before and just after, and the pool that the server says it has. What the memory brings is read before and after each
run; where it moved by more than a tenth, the run is dropped and counted.
"""

import asyncio
import re
import time
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from secrets import token_hex
from statistics import median

import numpy as np

from benchmarks.record import say
from benchmarks.servers import Running, quire_command, started
from benchmarks.test_model import smollm2_file
from proofs.capacity.traces import CONVERSATION
from proofs.framework.proof import Proof, section
from quire.backends.cpu.measured_roof import read_sum
from quire.bench.engine import EngineBench, EngineLoad
from quire.bench.http_client import Client
from quire.bench.load_run import Pace
from quire.bench.measures import metrics_of
from quire.bench.runs import Bench, BenchOptions, RunListener
from quire.bench.setup import LoadSetup
from quire.client.engines.opening import open_model
from quire.config import ModelSettings
from quire.engine.step_fit import fit_profile
from quire.engine.step_profile import StepProfile
from quire.sim.fleet.member import MemberSize
from quire.sim.fleet.report import FleetReport
from quire.sim.fleet.simulation import FleetConfig, FleetSimulation
from quire.workload.trace_requests import TraceRules, apply_rules, trace_requests
from quire.workload.traces import Trace, read_trace

LONGEST_TOKENS = 1024
MOST_TRACE_TOKENS = 16_384
"""Longer requests of the trace are left out, so that scaled ones are not all answers of two tokens."""
SHARE = 0.02
"""Of the trace's conversations."""
MAX_RUNNING = 16
NUM_THREADS = 1
"""The model has one core for itself: who asks the server is on the same machine, and no part of it."""
BUSY = 2.0
"""How much faster than the base can answer, by the profile, requests come: a server that keeps up with all of them has
the throughput of the load, whatever its settings."""
MOVED = 0.10
READ_BYTES = 1 << 28
DIFFERS = 0.15
MEMORY = "1536MiB"


@dataclass(frozen=True, slots=True)
class Setting:
    """Of a server, as its flags say it."""

    name: str
    memory: str = MEMORY
    step_tokens: int = 256
    block_size: int = 32
    class_shares: Mapping[str, float] = field(default_factory=dict)

    @property
    def flags(self) -> tuple[str, ...]:
        """For `quire serve`."""
        return (
            "--max-step-tokens",
            str(self.step_tokens),
            "--block-size",
            str(self.block_size),
            "--max-running",
            str(MAX_RUNNING),
            "--threads",
            str(NUM_THREADS),
        )


SETTINGS = (
    Setting("base"),
    Setting("small pool", memory="500MiB"),
    Setting("smaller pool", memory="430MiB"),
    Setting("step 64", step_tokens=64),
    Setting("step 512", step_tokens=512),
    Setting("blocks of 16", block_size=16),
    Setting("blocks of 64", block_size=64),
    Setting("classes", class_shares={"high": 0.3, "low": 0.3}),
)


@dataclass(frozen=True, slots=True)
class Figures:
    """What a run came to."""

    output_tokens_per_s: float
    ttft_s: float
    hit_rate: float


@section("real server")
def real_server(proof: Proof) -> None:
    """Errors of throughput and of the first token, and pairs of settings that the simulator ranks the other way."""
    trace, memory = scaled_trace(proof), np.ones(READ_BYTES // 4, np.float32)
    pairs: dict[str, list[tuple[Figures, Figures]]] = {setting.name: [] for setting in SETTINGS}
    num_dropped, errors = 0, list[float]()
    with timed_engine() as engine:
        engine.steps("slow", 1)  # the first steps of a process are
        before = engine.steps("first", 1)
        speedup = busy_speedup(trace, fit_profile("first", before))
        for number, setting in enumerate(SETTINGS * proof.sized(quick=1, full=5)):
            before_s = bandwidth(memory)
            real, num_blocks = through_server(setting, trace, speedup)
            moved = bandwidth(memory) / before_s
            after = engine.steps(f"{number}", 1)
            profile, before = fit_profile("smollm2", [*before, *after]), after
            errors.append(profile.relative_error)
            simulated = through_simulator(setting, trace, speedup, profile, num_blocks)
            is_kept = abs(moved - 1.0) <= MOVED
            say(f"  {setting.name}, {num_blocks} blocks: {real} real, {simulated} simulated, memory {moved:.2f}")
            num_dropped += not is_kept
            if is_kept:
                pairs[setting.name].append((real, simulated))
    proof.report("sim_profile_error", median(errors), "of steps that a profile was not made of, the median")
    proof.report("sim_runs_dropped", num_dropped, "the memory's speed had moved")
    proof.report("sim_speedup", speedup, f"of {len(trace.rows)} requests of the trace")
    _judge(proof, {name: runs for name, runs in pairs.items() if runs})


def _judge(proof: Proof, pairs: Mapping[str, Sequence[tuple[Figures, Figures]]]) -> None:
    proof.equals("sim_settings", len(pairs), len(SETTINGS), "with at least one run that counts")
    for key, name, bound in (("throughput", "output_tokens_per_s", 0.10), ("ttft", "ttft_s", 0.20)):
        medians = {
            setting: tuple(median(getattr(run[side], name) for run in runs) for side in (0, 1))
            for setting, runs in pairs.items()
        }
        errors = {setting: abs(simulated / real - 1.0) for setting, (real, simulated) in medians.items()}
        for setting, (real, simulated) in medians.items():
            spoken = setting.replace(" ", "_")
            proof.report(f"sim_{key}_{spoken}", simulated / real, f"{simulated:.3f} simulated, {real:.3f} real")
        proof.at_most(f"sim_{key}_error", median(errors.values()), bound, "median of the settings'")
        proof.equals(f"ranking_wrong_{key}", _ranked_wrong(medians), 0, "pairs that differ by more than 15%")


def _ranked_wrong(medians: Mapping[str, Sequence[float]]) -> int:
    """Pairs that differ in reality and are the other way round in the simulation."""
    return sum(
        abs(one[0] / two[0] - 1.0) > DIFFERS and (one[0] > two[0]) != (one[1] > two[1])
        for one, two in combinations(medians.values(), 2)
    )


def scaled_trace(proof: Proof) -> Trace:
    """Some conversations of the trace, its long requests left out, lengths scaled to what the model takes."""
    whole = read_trace(CONVERSATION).spread()
    rows = tuple(row for row in whole.rows if row.prompt_tokens + row.output_tokens <= MOST_TRACE_TOKENS)
    kept = tuple(rows[at] for at, _ in apply_rules(replace(whole, rows=rows), TraceRules(share=SHARE)))
    return replace(whole, rows=kept).head(proof.sized(quick=24, full=64)).fitted(LONGEST_TOKENS)


def bandwidth(memory: "np.ndarray[tuple[int], np.dtype[np.float32]]") -> float:
    """How many bytes a second are read, the median of a few reads."""
    taken = []
    for _ in range(7):
        began_s = time.perf_counter()
        read_sum(memory)
        taken.append(time.perf_counter() - began_s)
    return READ_BYTES / median(taken)


def timed_engine() -> EngineBench:
    """Of the model that the server has, with as many rows as any setting gives it."""
    model = ModelSettings(
        memory_bytes=4 << 30,
        max_sequence_tokens=LONGEST_TOKENS,
        max_step_tokens=512,
        max_running=MAX_RUNNING,
        num_threads=NUM_THREADS,
        speculation="off",
    )
    load = EngineLoad((1,), 1, 2, 0, 1, has_roof=False)
    return EngineBench(open_model(str(smollm2_file()), model), load, None, "smollm2")


def busy_speedup(trace: Trace, profile: StepProfile) -> float:
    """How much faster the trace must come."""
    told = _simulated(Setting("base"), trace, 1.0, profile, 1 << 16)
    return BUSY * trace.rows[-1].arrival_s / sum(one.busy_s for one in told.members)


def through_simulator(setting: Setting, trace: Trace, speedup: float, profile: StepProfile, num_blocks: int) -> Figures:
    """The pool that the server had, and steps as long as they were beside it."""
    told = _simulated(setting, trace, speedup, profile, num_blocks)
    return Figures(told.output_tokens_per_s, told.ttft_s.p50, told.hit_rate)


def _simulated(setting: Setting, trace: Trace, speedup: float, profile: StepProfile, num_blocks: int) -> FleetReport:
    size = MemberSize(num_blocks, setting.block_size, setting.step_tokens, MAX_RUNNING)
    config = FleetConfig(size, profile, "round-robin")
    return FleetSimulation(config, trace_requests(trace, _rules(setting, speedup))).run()


def _rules(setting: Setting, speedup: float) -> TraceRules:
    return TraceRules(speedup, class_shares=setting.class_shares)


def through_server(setting: Setting, trace: Trace, speedup: float) -> tuple[Figures, int]:
    """A server started for this, and how many blocks it says it has."""
    with started(quire_command(smollm2_file(), *setting.flags, memory=setting.memory)) as running:
        return asyncio.run(_asked(running, setting, trace, speedup)), _num_blocks(running)


async def _asked(running: Running, setting: Setting, trace: Trace, speedup: float) -> Figures:
    rules = _rules(setting, speedup)
    classes = {one.name: one.priority for one in trace_requests(trace, rules)}
    visits = [replace(visit, priority=classes[visit.name]) for visit in trace.visits(speedup)]
    async with Client(running.server) as client:
        bench = await Bench.open(client, BenchOptions(sends_priority=True), RunListener())
        maker = bench.maker(LoadSetup(prompts="tokens"), token_hex(4))
        pace = Pace(None, tuple(visit.arrival_s or 0.0 for visit in visits))
        told = metrics_of(await bench.run_visits(maker, visits, pace))
    if told["failed"]:
        raise RuntimeError(f"{told['failed']} requests failed: {told['error_kinds']}")
    return Figures(told["output_throughput"], told["median_ttft_ms"] / 1e3, told["cached_token_share"] or 0.0)


def _num_blocks(running: Running) -> int:
    with urllib.request.urlopen(f"{running.url}/metrics") as answer:  # noqa: S310 - a server of ours
        found = re.search(r'num_gpu_blocks="(\d+)"', answer.read().decode())
    if found is None:
        raise RuntimeError("the server's metrics do not say how many blocks it has")
    return int(found.group(1))
