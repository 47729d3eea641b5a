"""Fleets in the simulator: one seed gives one log, invariants hold whatever goes wrong, and a thousand members with a
million requests fit one core and its memory.

As a program it is a process of its own for the sections below: `digests SEED ...`, `members NUMBER REQUESTS`.
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
"""Requests for each member in a simulated second: it is nearly always busy."""
GPU = StepProfile.by_hand(prompt_tokens_per_s=16_000.0, step_s=0.01)
"""Like one GPU with a model of 8B; nobody measured it."""
TELL_EVERY = 20_000


def _digest(seed: int) -> str:
    return run_storm(seed).log_digest


def _in_a_process(*words: str, **environment: str) -> dict[str, Any]:
    """What this module says as a program."""
    command = [sys.executable, "-m", "proofs.capacity.fleets", *words]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env={**os.environ, **environment})
    told: dict[str, Any] = json.loads(done.stdout)
    return told


@section("deterministic")
def deterministic(proof: Proof) -> None:
    """Every seed twice, once more with several runs at a time in threads, and in a process that hashes otherwise."""
    seeds = range(proof.sized(quick=10, full=200))
    first = [_digest(seed) for seed in seeds]
    second = [_digest(seed) for seed in seeds]
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        threaded = list(pool.map(_digest, seeds))
    hashed = _in_a_process("digests", *map(str, seeds), PYTHONHASHSEED="12345")
    runs = (second, threaded, [hashed[str(seed)] for seed in seeds])
    differing = sum(one != other for run in runs for one, other in zip(first, run, strict=True))
    told = f"{len(seeds)} seeds: again, {NUM_THREADS} threads, another hash seed; {len(set(first))} different logs"
    proof.equals("deterministic", differing, 0, told)


@section("invariants")
def invariants(proof: Proof) -> None:
    """Small fleets of every policy under storms: of scheduler, memory and router, throughout."""
    num_breaches = num_lost = num_requests = num_deaths = num_moves = num_sent_to_dead = 0
    for seed in range(proof.sized(quick=40, full=2_000)):
        try:
            told = run_storm(seed)
        except InvariantError as error:
            say(f"  seed {seed}: {error}")
            num_breaches += 1
            continue
        num_lost += told.num_lost
        num_requests += told.num_requests
        num_deaths += told.num_deaths
        num_moves += told.num_moves
        num_sent_to_dead += told.num_sent_to_dead
    proof.equals("invariant_breaches", num_breaches, 0, f"{num_deaths:,} deaths, {num_moves:,} moves")
    told_lost = f"of {num_requests:,}; {num_sent_to_dead:,} were sent to members that were dead"
    proof.equals("requests_lost", num_lost, 0, told_lost)


@section("a thousand members")
def members_1000(proof: Proof) -> None:
    """A process of its own, so that its memory is its own."""
    num_members, num_requests = proof.sized(quick=20, full=1_000), proof.sized(quick=20_000, full=1_000_000)
    told = _in_a_process("members", str(num_members), str(num_requests))
    size = f"{num_members:,} members, {num_requests:,} requests"
    proof.equals("members_1000", told["num_ended"], num_requests, f"{size}: requests that ended")
    proof.at_most("members_1000_gib", told["peak_gib"], 12.0, "peak memory")
    proof.report("members_1000_s", told["processor_s"], "processor time of one core")
    proof.report("members_1000_elapsed_s", told["elapsed_s"], "with whatever else the machine did")
    proof.report("members_1000_us", 1e6 * told["processor_s"] / num_requests, "for each request")
    proof.report("members_1000_hit_rate", told["hit_rate"])
    proof.report("members_1000_imbalance", told["imbalance"])
    proof.report("members_1000_utilisation", told["utilisation"])


def conversations(random: Random, num_requests: int, rate: float) -> Iterator[WorkloadRequest]:
    """Made as they are asked for. Half of them go on in a conversation: three blocks of it, and an own rest; the others
    begin one behind one of 64 system prompts. Content is an id again and again: quickly written."""
    now_s, last_id = 0.0, 64
    open_ones: list[tuple[int, ...]] = []
    systems = [(1 + number,) * BLOCK for number in range(64)]
    rest_tokens = PROMPT_TOKENS - 3 * BLOCK
    for number in range(num_requests):
        now_s += random.expovariate(rate)
        if open_ones and random.random() < 0.5:
            begun = random.choice(open_ones)
        else:
            begun = random.choice(systems) + (last_id + 1,) * BLOCK + (last_id + 2,) * BLOCK
            last_id += 2
            if len(open_ones) <= num_requests // 50:
                open_ones.append(begun)
            else:
                open_ones[random.randrange(len(open_ones))] = begun
        last_id += 1
        yield WorkloadRequest(f"r{number}", now_s, begun + (last_id,) * rest_tokens, OUTPUT_TOKENS, seed=0)


def _run_members(num_members: int, num_requests: int) -> dict[str, Any]:
    def counted(requests: Iterator[WorkloadRequest]) -> Iterator[WorkloadRequest]:
        for number, asked in enumerate(requests):
            if number % TELL_EVERY == 0:
                say(f"  {number:,} requests, {time.process_time() - began_s:,.0f} s of processor time")
            yield asked

    began_s, began_elapsed_s = time.process_time(), time.monotonic()
    config = FleetConfig(MemberSize(500, BLOCK), GPU, "cost", num_members)
    load = conversations(Random("a thousand members"), num_requests, RATE * num_members)
    told = FleetSimulation(config, counted(load)).run()
    return {
        "num_ended": told.num_requests - told.num_lost - told.num_refused,
        "processor_s": time.process_time() - began_s,
        "elapsed_s": time.monotonic() - began_elapsed_s,
        "peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        "hit_rate": told.hit_rate,
        "imbalance": told.imbalance,
        "utilisation": told.utilisation,
        "log_digest": told.log_digest,
    }


def _as_program(words: Sequence[str]) -> dict[str, Any]:
    what, *numbers = words
    if what == "digests":
        return {seed: _digest(int(seed)) for seed in numbers}
    return _run_members(*map(int, numbers))


if __name__ == "__main__":
    sys.stdout.write(json.dumps(_as_program(sys.argv[1:])) + "\n")
