"""Compares the simulator with a real server: both get the same requests with the same arrival times.

For every setting, `quire serve` runs SmolLM2 and gets the requests of a public trace over HTTP, with scaled lengths.
Engine steps are timed between the runs: the simulator uses a step profile fitted to the timings just before and just
after a run, and the server's number of KV blocks. Memory bandwidth is measured before and after each run; if it changed
by more than a tenth, the run is dropped and counted.
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
MAX_TRACE_TOKENS = 16_384
"""Longer requests of the trace are left out; otherwise scaling would shrink most answers to two tokens."""
SHARE = 0.02
"""The share of the trace's conversations that is used."""
MAX_RUNNING = 16
NUM_THREADS = 1
"""The model has one core for itself, because the client runs on the same machine."""
OVERLOAD = 2.0
"""The arrival rate over the simulated capacity of the base setting. Without overload the throughput would be that of
the load, whatever the settings."""
MAX_BANDWIDTH_CHANGE = 0.10
READ_BYTES = 1 << 28
MIN_DIFFERENCE = 0.15
MEMORY = "1536MiB"


@dataclass(frozen=True, slots=True)
class Setting:
    """The settings of one server, real or simulated."""

    name: str
    memory: str = MEMORY
    step_tokens: int = 256
    block_size: int = 32
    class_shares: Mapping[str, float] = field(default_factory=dict)

    @property
    def flags(self) -> tuple[str, ...]:
        """The command-line flags of `quire serve`."""
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
    """The metrics of one run; `ttft_s` is the median."""

    output_tokens_per_s: float
    ttft_s: float
    hit_rate: float


@section("real server")
def real_server(proof: Proof) -> None:
    """Errors of simulated throughput and TTFT, and pairs of settings that the simulator ranks in the wrong order."""
    trace, memory = scaled_trace(proof), np.ones(READ_BYTES // 4, np.float32)
    pairs: dict[str, list[tuple[Figures, Figures]]] = {setting.name: [] for setting in SETTINGS}
    num_dropped, errors = 0, list[float]()
    with timed_engine() as engine:
        engine.steps("slow", 1)  # a warm-up: the first steps of a process are slow
        before = engine.steps("first", 1)
        speedup = overload_speedup(trace, fit_profile("first", before))
        for number, setting in enumerate(SETTINGS * proof.sized(quick=1, full=5)):
            before_s = bandwidth(memory)
            real, num_blocks = run_server(setting, trace, speedup)
            change = bandwidth(memory) / before_s
            after = engine.steps(f"{number}", 1)
            profile, before = fit_profile("smollm2", [*before, *after]), after
            errors.append(profile.relative_error)
            simulated = run_simulator(setting, trace, speedup, profile, num_blocks)
            is_valid = abs(change - 1.0) <= MAX_BANDWIDTH_CHANGE
            say(f"  {setting.name}, {num_blocks} blocks: {real} real, {simulated} simulated, memory {change:.2f}")
            num_dropped += not is_valid
            if is_valid:
                pairs[setting.name].append((real, simulated))
    proof.report("sim_profile_error", median(errors), "median error of the fitted step profiles")
    proof.report("sim_runs_dropped", num_dropped, "because memory bandwidth had changed")
    proof.report("sim_speedup", speedup, f"of {len(trace.rows)} requests of the trace")
    _judge(proof, {name: runs for name, runs in pairs.items() if runs})


def _judge(proof: Proof, pairs: Mapping[str, Sequence[tuple[Figures, Figures]]]) -> None:
    proof.equals("sim_settings", len(pairs), len(SETTINGS), "with at least one run that was not dropped")
    for key, name, bound in (("throughput", "output_tokens_per_s", 0.10), ("ttft", "ttft_s", 0.20)):
        medians = {
            setting: tuple(median(getattr(run[side], name) for run in runs) for side in (0, 1))
            for setting, runs in pairs.items()
        }
        errors = {setting: abs(simulated / real - 1.0) for setting, (real, simulated) in medians.items()}
        for setting, (real, simulated) in medians.items():
            suffix = setting.replace(" ", "_")
            proof.report(f"sim_{key}_{suffix}", simulated / real, f"{simulated:.3f} simulated, {real:.3f} real")
        proof.at_most(f"sim_{key}_error", median(errors.values()), bound, "median of the settings'")
        proof.equals(f"ranking_wrong_{key}", _num_wrong_ranks(medians), 0, "pairs that differ by more than 15%")


def _num_wrong_ranks(medians: Mapping[str, Sequence[float]]) -> int:
    """Count pairs of settings that differ on the real server and are ranked in the wrong order by the simulator."""
    return sum(
        abs(a[0] / b[0] - 1.0) > MIN_DIFFERENCE and (a[0] > b[0]) != (a[1] > b[1])
        for a, b in combinations(medians.values(), 2)
    )


def scaled_trace(proof: Proof) -> Trace:
    """Some conversations of the trace, without its long requests, lengths scaled to the context of the model."""
    full_trace = read_trace(CONVERSATION).spread()
    rows = tuple(row for row in full_trace.rows if row.prompt_tokens + row.output_tokens <= MAX_TRACE_TOKENS)
    sample = tuple(rows[index] for index, _ in apply_rules(replace(full_trace, rows=rows), TraceRules(share=SHARE)))
    return replace(full_trace, rows=sample).head(proof.sized(quick=24, full=64)).fitted(LONGEST_TOKENS)


def bandwidth(memory: "np.ndarray[tuple[int], np.dtype[np.float32]]") -> float:
    """Return the memory bandwidth in bytes per second, the median of a few reads."""
    durations = []
    for _ in range(7):
        began_s = time.perf_counter()
        read_sum(memory)
        durations.append(time.perf_counter() - began_s)
    return READ_BYTES / median(durations)


def timed_engine() -> EngineBench:
    """Return a benchmark of the server's model, with as many rows per step as the largest setting."""
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


def overload_speedup(trace: Trace, profile: StepProfile) -> float:
    """Return the factor by which the trace must be sped up to overload the base setting."""
    report = _simulate(Setting("base"), trace, 1.0, profile, 1 << 16)
    return OVERLOAD * trace.rows[-1].arrival_s / sum(member.busy_s for member in report.members)


def run_simulator(setting: Setting, trace: Trace, speedup: float, profile: StepProfile, num_blocks: int) -> Figures:
    """Simulate a run with the server's number of blocks and the step profile of the same time."""
    report = _simulate(setting, trace, speedup, profile, num_blocks)
    return Figures(report.output_tokens_per_s, report.ttft_s.p50, report.hit_rate)


def _simulate(setting: Setting, trace: Trace, speedup: float, profile: StepProfile, num_blocks: int) -> FleetReport:
    size = MemberSize(num_blocks, setting.block_size, setting.step_tokens, MAX_RUNNING)
    config = FleetConfig(size, profile, "round-robin")
    return FleetSimulation(config, trace_requests(trace, _rules(setting, speedup))).run()


def _rules(setting: Setting, speedup: float) -> TraceRules:
    return TraceRules(speedup, class_shares=setting.class_shares)


def run_server(setting: Setting, trace: Trace, speedup: float) -> tuple[Figures, int]:
    """Start a server for this run, and return the figures and its number of KV blocks."""
    with started(quire_command(smollm2_file(), *setting.flags, memory=setting.memory)) as running:
        return asyncio.run(_run_trace(running, setting, trace, speedup)), _num_blocks(running)


async def _run_trace(running: Running, setting: Setting, trace: Trace, speedup: float) -> Figures:
    rules = _rules(setting, speedup)
    classes = {request.name: request.priority for request in trace_requests(trace, rules)}
    visits = [replace(visit, priority=classes[visit.name]) for visit in trace.visits(speedup)]
    async with Client(running.server) as client:
        bench = await Bench.open(client, BenchOptions(sends_priority=True), RunListener())
        maker = bench.maker(LoadSetup(prompts="tokens"), token_hex(4))
        pace = Pace(None, tuple(visit.arrival_s or 0.0 for visit in visits))
        metrics = metrics_of(await bench.run_visits(maker, visits, pace))
    if metrics["failed"]:
        raise RuntimeError(f"{metrics['failed']} requests failed: {metrics['error_kinds']}")
    return Figures(metrics["output_throughput"], metrics["median_ttft_ms"] / 1e3, metrics["cached_token_share"] or 0.0)


def _num_blocks(running: Running) -> int:
    with urllib.request.urlopen(f"{running.url}/metrics") as response:  # noqa: S310 - a server that this proof started
        match = re.search(r'num_gpu_blocks="(\d+)"', response.read().decode())
    if match is None:
        raise RuntimeError("expected num_gpu_blocks in the server's /metrics, got none")
    return int(match.group(1))
