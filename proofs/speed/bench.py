"""`make proof-bench`: the benchmark is lighter than what it measures, its verdicts are right, and what batching gives.

The first section needs no model: a server that thinks nothing sends what it was told to. The others start `quire serve`
with SmolLM2 in fp32 and ask it over HTTP; a worse build is one whose steps take a tenth longer.
"""

import statistics
import sys

from benchmarks.servers import Command, Running, null_command, quire_command, started
from benchmarks.test_model import smollm2_directory
from proofs.framework.proof import Proof, run, section
from quire.bench.compare import Comparison, compare_records
from quire.bench.http_client import Client
from quire.bench.outcome import Run
from quire.bench.runs import Bench, BenchOptions, RunListener, measure_interleaved, run_async, seeded
from quire.bench.setup import LoadSetup
from quire.verdicts import SpeedVerdict

NUM_STREAMS = 64
GAP_MS = 64.0
SLOWDOWN = 1.1
NUM_VERDICTS = 10
SMALL_MEMORY = "1500MiB"
"""A pool of some six thousand tokens."""
WARM = BenchOptions(num_warmups=0)
"""Servers are asked once when they are started."""


# -- the benchmark itself ----------------------------------------------------------------------------------------------


@section("client overhead")
def client_overhead(proof: Proof) -> None:
    """How late the client notices an event, as a share of the gap between two events of a stream."""
    spread = _lateness(proof, phases=NUM_STREAMS)
    proof.at_most("client_overhead", spread, 0.02, "of the gap")
    proof.report("client_overhead_in_bursts", _lateness(proof, phases=1), "all streams speak at once")


def _lateness(proof: Proof, phases: int) -> float:
    num_tokens = proof.sized(quick=48, full=400)
    setup = LoadSetup(
        requests=NUM_STREAMS, concurrency=NUM_STREAMS, prompt_tokens=32, output_tokens=num_tokens, prompts="tokens"
    )
    with started(null_command(gap_ms=GAP_MS, phases=phases)) as running:
        done = _load(running, seeded(setup))
    # One machine, one monotonic clock: the stamp a piece carries can be laid beside the one it was given here.
    late = [stamp - float(piece) for one in done.outcomes for stamp, piece in zip(one.token_s, one.pieces, strict=True)]
    if len(late) != NUM_STREAMS * num_tokens:
        raise RuntimeError(f"{NUM_STREAMS * num_tokens} events were sent, {len(late)} came")
    return statistics.median(late) / (GAP_MS / 1000.0)


@section("verdicts")
def verdicts(proof: Proof) -> None:
    """A build of ours with itself, and with one whose steps take a tenth longer; the same for a server that only waits.

    Every comparison is a whole run of rounds of its own.
    """
    ours = [quire_command(smollm2_directory(), memory=SMALL_MEMORY, slowdown=by) for by in (1.0, SLOWDOWN)]
    _told_apart(proof, "", *ours)
    _told_apart(proof, "null_", null_command(), null_command(slowdown=SLOWDOWN))


def _told_apart(proof: Proof, name: str, build: Command, slower: Command) -> None:
    with started(build) as one:
        _warm(one)
        for key, other, expected in (
            ("same_build_no_difference", build, SpeedVerdict.NO_DIFFERENCE),
            ("slowed_build_found", slower, SpeedVerdict.SLOWER),
        ):
            with started(other) as two:
                _warm(two)
                told = [_compared(proof, one, two) for _ in range(proof.sized(quick=1, full=NUM_VERDICTS))]
            share = [one.verdict for one in told].count(expected) / len(told)
            proof.at_least(f"{name}{key}", share, 0.9)
            change = statistics.median(one.changes[0].change for one in told)
            proof.report(f"{name}{key}_change", change, "output tokens/s")


def _warm(running: Running) -> None:
    """Lead more tokens through a server than its pool holds.

    A server that has just been started gets its pool's pages from the system as it first writes to them, and until it
    has them all it is a few percent slower than one that has run for a while.
    """
    setup = LoadSetup(requests=32, concurrency=16, prompt_tokens=256, output_tokens=1, prompts="tokens")
    _load(running, seeded(setup))


def _compared(proof: Proof, a: Running, b: Running) -> Comparison:
    # Many short rounds, not few long ones: what a neighbour takes hits some of them, and those do not decide.
    setup = LoadSetup(requests=8, concurrency=8, prompt_tokens=16, output_tokens=24, prompts="tokens")
    rounds = proof.sized(quick=14, full=24)
    return compare_records(
        *run_async(measure_interleaved((a.server, b.server), seeded(setup), rounds, WARM, RunListener()))
    )


# -- what this project was begun for -----------------------------------------------------------------------------------


@section("batching and prefix")
def our_server(proof: Proof) -> None:
    with started(quire_command(smollm2_directory())) as running:
        for prompt_tokens, output_tokens, bound in ((32, 128, 6.0), (256, 64, 3.5)):
            speedup = _speedup(proof, running, prompt_tokens, output_tokens)
            proof.at_least(f"batching_speedup_16_{prompt_tokens}_{output_tokens}", speedup, bound)
        prefix(proof, running)


def _speedup(proof: Proof, running: Running, prompt_tokens: int, output_tokens: int) -> float:
    """Output tokens per second of 16 clients over one, interleaved; the median over the rounds."""
    alone: list[float] = []
    together: list[float] = []
    for _ in range(proof.sized(quick=2, full=7)):
        for clients, kept in ((1, alone), (16, together)):
            setup = LoadSetup(
                requests=clients * proof.sized(quick=1, full=2),
                concurrency=clients,
                prompt_tokens=prompt_tokens,
                output_tokens=output_tokens,
                prompts="tokens",
            )
            done = _load(running, seeded(setup))
            kept.append(sum(one.output_tokens for one in done.outcomes) / done.duration_s)
    return statistics.median(together) / statistics.median(alone)


def prefix(proof: Proof, running: Running) -> None:
    """One client asks twice under a prefix nobody has seen: the first computes it, the second finds it."""
    cold, warm, cached = [], [], []
    setup = LoadSetup(
        workload="shared",
        requests=2,
        concurrency=1,
        prompt_tokens=32,
        shared_tokens=1024,
        output_tokens=2,
        prompts="tokens",
    )
    for _ in range(proof.sized(quick=3, full=15)):
        first, second = _load(running, seeded(setup)).outcomes
        cold.append(first.ttft_s)
        warm.append(second.ttft_s)
        cached.append(second.cached_tokens or 0)
    ratio = statistics.median(cold) / statistics.median(warm)
    told = f"{statistics.median(cold) * 1e3:.0f} ms over {statistics.median(warm) * 1e3:.0f} ms"
    proof.equals("prefix_cached_tokens", min(cached), 1024, "of 1,056")
    proof.at_least("prefix_ttft_ratio", ratio, 10, told)


def _load(running: Running, setup: LoadSetup) -> Run:
    """One load; every request must be answered whole."""

    async def main() -> Run:
        async with Client(running.server) as client:
            bench = await Bench.open(client, WARM, RunListener())
            return (await bench.run(setup, setup.seed, ""))[1]

    done = run_async(main())
    failed = [one for one in done.outcomes if not one.is_ok]
    if failed:
        raise RuntimeError(f"{len(failed)} requests failed, the first with {failed[0].error}: {failed[0].detail}")
    return done


PATHS = ("src/quire/bench", "src/quire/engine", "src/quire/core", "src/quire/backends", "native")

if __name__ == "__main__":
    sys.exit(run("bench", paths=PATHS))
