"""Simulated fleets: equal seeds give equal logs, invariants hold under random faults, and a thousand members with a
million requests can be simulated on one core.

The sections run this module as a separate process: `digests SEED ...` or `members NUM_MEMBERS NUM_REQUESTS`.
"""

import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from random import Random
from typing import Any

from benchmarks.record import say
from proofs.framework.proof import Proof, section
from quire.engine.step_profile import StepProfile
from quire.errors import InvariantError
from quire.sim.fleet.member import MemberSize
from quire.sim.fleet.simulation import FleetConfig, FleetSimulation
from quire.workload.workload_request import WorkloadRequest
from tests.support.fleet.fleet_storms import run_storm

NUM_THREADS = 4
BLOCK = 512
PROMPT_TOKENS, OUTPUT_TOKENS = 2_000, 50
RATE = 12.0
"""Requests per member and simulated second: members are nearly always busy."""
GPU = StepProfile.by_hand(prompt_tokens_per_s=16_000.0, step_s=0.01)
"""An estimate, not a measurement, of one GPU with an 8B model."""
REQUESTS_PER_MESSAGE = 20_000


def _digest(seed: int) -> str:
    return run_storm(seed).log_digest


def _run_in_process(*arguments: str, **environment: str) -> dict[str, Any]:
    """Run this module as a program, and return its JSON output."""
    command = [sys.executable, "-m", "proofs.capacity.fleets", *arguments]
    process = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env={**os.environ, **environment})
    report: dict[str, Any] = json.loads(process.stdout)
    return report


@section("deterministic")
def deterministic(proof: Proof) -> None:
    """Run every seed twice, once more in parallel threads, and once more in a process with another hash seed."""
    seeds = range(proof.sized(quick=10, full=200))
    first = [_digest(seed) for seed in seeds]
    second = [_digest(seed) for seed in seeds]
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        threaded = list(pool.map(_digest, seeds))
    hashed = _run_in_process("digests", *map(str, seeds), PYTHONHASHSEED="12345")
    runs = (second, threaded, [hashed[str(seed)] for seed in seeds])
    differing = sum(a != b for run in runs for a, b in zip(first, run, strict=True))
    note = f"{len(seeds)} seeds: again, {NUM_THREADS} threads, another hash seed; {len(set(first))} different logs"
    proof.equals("deterministic", differing, 0, note)


@section("invariants")
def invariants(proof: Proof) -> None:
    """Invariants of scheduler, memory and router in small fleets of every policy, under random faults."""
    num_breaches = num_lost = num_requests = num_deaths = num_moves = num_sent_to_dead = 0
    for seed in range(proof.sized(quick=40, full=2_000)):
        try:
            report = run_storm(seed)
        except InvariantError as error:
            say(f"  seed {seed}: {error}")
            num_breaches += 1
            continue
        num_lost += report.num_lost
        num_requests += report.num_requests
        num_deaths += report.num_deaths
        num_moves += report.num_moves
        num_sent_to_dead += report.num_sent_to_dead
    proof.equals("invariant_breaches", num_breaches, 0, f"{num_deaths:,} deaths, {num_moves:,} moves")
    note = f"of {num_requests:,}; {num_sent_to_dead:,} were sent to crashed members"
    proof.equals("requests_lost", num_lost, 0, note)


@section("a thousand members")
def members_1000(proof: Proof) -> None:
    """The simulation runs in a separate process, so that its peak memory can be measured."""
    num_members, num_requests = proof.sized(quick=20, full=1_000), proof.sized(quick=20_000, full=1_000_000)
    report = _run_in_process("members", str(num_members), str(num_requests))
    size = f"{num_members:,} members, {num_requests:,} requests"
    proof.equals("members_1000", report["num_ended"], num_requests, f"{size}: requests that ended")
    proof.at_most("members_1000_gib", report["peak_gib"], 12.0, "peak memory")
    proof.report("members_1000_s", report["processor_s"], "processor time of one core")
    proof.report("members_1000_elapsed_s", report["elapsed_s"], "wall clock, other load of the machine included")
    proof.report("members_1000_us", 1e6 * report["processor_s"] / num_requests, "for each request")
    proof.report("members_1000_hit_rate", report["hit_rate"])
    proof.report("members_1000_imbalance", report["imbalance"])
    proof.report("members_1000_utilisation", report["utilisation"])


def conversations(random: Random, num_requests: int, rate: float) -> Iterator[WorkloadRequest]:
    """Generate requests lazily. Half of them continue a conversation: its three blocks, and a new rest. The others
    begin a conversation with one of 64 system prompts. A block repeats one token id, which is quick to generate."""
    now_s, last_id = 0.0, 64
    conversation_starts: list[tuple[int, ...]] = []
    system_prompts = [(1 + number,) * BLOCK for number in range(64)]
    rest_tokens = PROMPT_TOKENS - 3 * BLOCK
    for number in range(num_requests):
        now_s += random.expovariate(rate)
        if conversation_starts and random.random() < 0.5:
            start = random.choice(conversation_starts)
        else:
            start = random.choice(system_prompts) + (last_id + 1,) * BLOCK + (last_id + 2,) * BLOCK
            last_id += 2
            if len(conversation_starts) <= num_requests // 50:
                conversation_starts.append(start)
            else:
                conversation_starts[random.randrange(len(conversation_starts))] = start
        last_id += 1
        yield WorkloadRequest(f"r{number}", now_s, start + (last_id,) * rest_tokens, OUTPUT_TOKENS, seed=0)


def _run_members(num_members: int, num_requests: int) -> dict[str, Any]:
    def with_progress(requests: Iterator[WorkloadRequest]) -> Iterator[WorkloadRequest]:
        for number, request in enumerate(requests):
            if number % REQUESTS_PER_MESSAGE == 0:
                say(f"  {number:,} requests, {time.process_time() - began_s:,.0f} s of processor time")
            yield request

    began_s, began_elapsed_s = time.process_time(), time.monotonic()
    config = FleetConfig(MemberSize(500, BLOCK), GPU, "cost", num_members)
    load = conversations(Random("a thousand members"), num_requests, RATE * num_members)
    report = FleetSimulation(config, with_progress(load)).run()
    return {
        "num_ended": report.num_requests - report.num_lost - report.num_refused,
        "processor_s": time.process_time() - began_s,
        "elapsed_s": time.monotonic() - began_elapsed_s,
        "peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        "hit_rate": report.hit_rate,
        "imbalance": report.imbalance,
        "utilisation": report.utilisation,
        "log_digest": report.log_digest,
    }


def _run_command(arguments: Sequence[str]) -> dict[str, Any]:
    command, *numbers = arguments
    if command == "digests":
        return {seed: _digest(int(seed)) for seed in numbers}
    return _run_members(*map(int, numbers))


if __name__ == "__main__":
    sys.stdout.write(json.dumps(_run_command(sys.argv[1:])) + "\n")
