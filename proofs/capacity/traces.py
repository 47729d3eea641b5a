"""A public trace through the real scheduler and memory, beside an independent replay; and fleets on it."""

import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from benchmarks.record import say
from proofs.framework.proof import Proof, section
from quire.engine.step_profile import StepProfile
from quire.sim.fleet.member import MemberSize
from quire.sim.fleet.report import FleetReport
from quire.sim.fleet.simulation import FleetConfig, FleetSimulation
from quire.workload.trace_requests import TraceRules, trace_requests
from quire.workload.traces import Trace, read_trace
from quire.workload.workload_request import WorkloadRequest
from tests.support.core.block_lru import BlockLru

TRACES = Path(__file__).parents[3] / "shared" / "data" / "traces"
CONVERSATION = TRACES / "mooncake_conversation_trace.jsonl.gz"
BLOCK = 512
PROMPT_TOKENS_PER_S = 16_000.0
GPU = StepProfile.by_hand(prompt_tokens_per_s=PROMPT_TOKENS_PER_S, step_s=0.01)
"""Like one GPU with a model of 8B; nobody measured it."""
BUSY = 0.8
"""How much of its time every fleet here would compute prompts if nothing were cached, and nothing else."""


def conversation(proof: Proof) -> Trace:
    """The trace, or its beginning."""
    return read_trace(CONVERSATION).head(proof.sized(quick=300, full=12_031))


@section("one member")
def one_member(proof: Proof) -> None:
    """A pool of 3,000 blocks: how long the trace takes here, and its hits against those of an LRU replay."""
    trace = conversation(proof)
    size = MemberSize(3_000, BLOCK, max_step_tokens=8_192)
    began_s = time.process_time()
    told = _run(FleetConfig(size, GPU, "round-robin"), trace_requests(trace))
    proof.at_most("trace_s", time.process_time() - began_s, 120.0, f"{told.num_requests:,} requests, processor time")
    alone = MemberSize(3_000, BLOCK, max_step_tokens=8_192, max_running=1)
    short = [replace(one, max_tokens=1) for one in trace_requests(trace)]
    found = _run(FleetConfig(alone, GPU, "round-robin"), short)
    exact = BlockLru(3_000, BLOCK)
    for asked in short:
        exact.run(asked.prompt)
    proof.report("hit_rate", told.hit_rate)
    proof.report("hit_rate_replayed", exact.hit_rate)
    proof.equals("hit_error_alone", abs(found.hit_rate - exact.hit_rate), 0.0, "one sequence at a time, one token each")
    proof.at_most("hit_error", abs(told.hit_rate - exact.hit_rate), 0.01, "many at once, with their answers")


def _equally_busy(trace: Trace, num_members: int) -> float:
    """How much faster the trace must come."""
    num_tokens = sum(row.prompt_tokens for row in trace.rows)
    return BUSY * num_members * PROMPT_TOKENS_PER_S * trace.rows[-1].arrival_s / num_tokens


def _run(config: FleetConfig, requests: Iterable[WorkloadRequest]) -> FleetReport:
    told = FleetSimulation(config, requests).run()
    say(
        f"  {told.num_requests:,} requests, {told.hit_rate:.4f} hits, TTFT p90 {told.ttft_s.p90:.2f} s, "
        f"imbalance {told.imbalance:.2f}, utilisation {told.utilisation:.2f}"
    )
    return told


@section("policies")
def policies(proof: Proof) -> None:
    """Fleets of 16 and 64, equally busy, beside one pool of the same size and beside the least loaded."""
    trace = conversation(proof).spread()
    for num_members, age_s in ((16, 0.25), (64, 0.06)):
        rules = TraceRules(speedup=_equally_busy(trace, num_members))
        whole = MemberSize(1_000 * num_members, BLOCK, 8_192 * num_members, 256 * num_members, speed=num_members)
        ideal = _run(FleetConfig(whole, GPU, "round-robin"), trace_requests(trace, rules))
        size = MemberSize(1_000, BLOCK)
        cost, least = (
            _run(FleetConfig(size, GPU, name, num_members), trace_requests(trace, rules))
            for name in ("cost", "least-loaded")
        )
        many = _run(
            FleetConfig(size, GPU, "cost", num_members, 8, report_age_s=age_s),
            trace_requests(trace, rules),
        )
        proof.at_least(f"policy_hit_{num_members}", cost.hit_rate / ideal.hit_rate, 0.85, "over one pool's")
        proof.at_most(f"policy_imbalance_{num_members}", cost.imbalance, 1.4)
        proof.at_most(f"policy_ttft_{num_members}", cost.ttft_s.p90 / least.ttft_s.p90, 1.0, "p90 over least loaded's")
        proof.at_least(f"gateways_8_hit_{num_members}", many.hit_rate / ideal.hit_rate, 0.83)
        proof.at_most(
            f"gateways_8_ttft_{num_members}", many.ttft_s.p90 / cost.ttft_s.p90, 1.5, "p90 over one gateway's"
        )


@section("sizes")
def sizes(proof: Proof) -> None:
    """Ten members and a hundred, equally busy: what gateways of them have to know, for docs/concepts/scale.md."""
    trace = conversation(proof).spread()
    for num_members in (10, 100):
        rules = TraceRules(speedup=_equally_busy(trace, num_members))
        config = FleetConfig(MemberSize(1_000, BLOCK), GPU, "cost", num_members)
        told = _run(config, trace_requests(trace, rules))
        proof.report(f"size_{num_members}_hit", told.hit_rate)
        proof.report(f"size_{num_members}_imbalance", told.imbalance)
        proof.report(f"size_{num_members}_ttft_p90_s", told.ttft_s.p90)
        proof.report(f"size_{num_members}_requests_per_s", told.num_requests * rules.speedup / trace.rows[-1].arrival_s)
