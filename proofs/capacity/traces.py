"""Simulates a public trace on one member, compared with an independent LRU replay, and on fleets."""

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
"""An estimate, not a measurement, of one GPU with an 8B model."""
PREFILL_LOAD = 0.8
"""The share of its time that every fleet here would spend on prefill if nothing were cached."""


def conversation(proof: Proof) -> Trace:
    """The trace; at quick scale, its beginning."""
    return read_trace(CONVERSATION).head(proof.sized(quick=300, full=12_031))


@section("one member")
def one_member(proof: Proof) -> None:
    """A pool of 3,000 blocks: the time of the simulation, and its hit rate compared with that of an LRU replay."""
    trace = conversation(proof)
    size = MemberSize(3_000, BLOCK, max_step_tokens=8_192)
    began_s = time.process_time()
    report = _run(FleetConfig(size, GPU, "round-robin"), trace_requests(trace))
    proof.at_most("trace_s", time.process_time() - began_s, 120.0, f"{report.num_requests:,} requests, processor time")
    serial_size = MemberSize(3_000, BLOCK, max_step_tokens=8_192, max_running=1)
    requests = [replace(row, max_tokens=1) for row in trace_requests(trace)]
    serial = _run(FleetConfig(serial_size, GPU, "round-robin"), requests)
    replay = BlockLru(3_000, BLOCK)
    for short_request in requests:
        replay.run(short_request.prompt)
    proof.report("hit_rate", report.hit_rate)
    proof.report("hit_rate_replayed", replay.hit_rate)
    proof.equals("hit_error_alone", abs(serial.hit_rate - replay.hit_rate), 0.0, "one running sequence, one token each")
    proof.at_most("hit_error", abs(report.hit_rate - replay.hit_rate), 0.01, "many running sequences, full answers")


def _speedup(trace: Trace, num_members: int) -> float:
    """Return the speedup of the trace at which prefill takes `PREFILL_LOAD` of the fleet's time."""
    num_tokens = sum(row.prompt_tokens for row in trace.rows)
    return PREFILL_LOAD * num_members * PROMPT_TOKENS_PER_S * trace.rows[-1].arrival_s / num_tokens


def _run(config: FleetConfig, requests: Iterable[WorkloadRequest]) -> FleetReport:
    report = FleetSimulation(config, requests).run()
    say(
        f"  {report.num_requests:,} requests, {report.hit_rate:.4f} hits, TTFT p90 {report.ttft_s.p90:.2f} s, "
        f"imbalance {report.imbalance:.2f}, utilisation {report.utilisation:.2f}"
    )
    return report


@section("policies")
def policies(proof: Proof) -> None:
    """The cost policy on equally busy fleets of 16 and 64, compared with one shared pool and with least-loaded."""
    trace = conversation(proof).spread()
    for num_members, age_s in ((16, 0.25), (64, 0.06)):
        rules = TraceRules(speedup=_speedup(trace, num_members))
        pool_size = MemberSize(1_000 * num_members, BLOCK, 8_192 * num_members, 256 * num_members, speed=num_members)
        ideal = _run(FleetConfig(pool_size, GPU, "round-robin"), trace_requests(trace, rules))
        size = MemberSize(1_000, BLOCK)
        cost, baseline = (
            _run(FleetConfig(size, GPU, name, num_members), trace_requests(trace, rules))
            for name in ("cost", "least-loaded")
        )
        config = FleetConfig(size, GPU, "cost", num_members, num_gateways=8, report_age_s=age_s)
        many_gateways = _run(config, trace_requests(trace, rules))
        proof.at_least(f"policy_hit_{num_members}", cost.hit_rate / ideal.hit_rate, 0.85, "over one pool's")
        proof.at_most(f"policy_imbalance_{num_members}", cost.imbalance, 1.4)
        proof.at_most(f"policy_ttft_{num_members}", cost.ttft_s.p90 / baseline.ttft_s.p90, 1.0, "over least loaded's")
        proof.at_least(f"gateways_8_hit_{num_members}", many_gateways.hit_rate / ideal.hit_rate, 0.83)
        proof.at_most(
            f"gateways_8_ttft_{num_members}", many_gateways.ttft_s.p90 / cost.ttft_s.p90, 1.5, "p90 over one gateway's"
        )


@section("sizes")
def sizes(proof: Proof) -> None:
    """Figures of equally busy fleets of ten and a hundred members, for docs/concepts/scale.md."""
    trace = conversation(proof).spread()
    for num_members in (10, 100):
        rules = TraceRules(speedup=_speedup(trace, num_members))
        config = FleetConfig(MemberSize(1_000, BLOCK), GPU, "cost", num_members)
        fleet = _run(config, trace_requests(trace, rules))
        proof.report(f"size_{num_members}_hit", fleet.hit_rate)
        proof.report(f"size_{num_members}_imbalance", fleet.imbalance)
        proof.report(f"size_{num_members}_ttft_p90_s", fleet.ttft_s.p90)
        rate_per_s = fleet.num_requests * rules.speedup / trace.rows[-1].arrival_s
        proof.report(f"size_{num_members}_requests_per_s", rate_per_s)
