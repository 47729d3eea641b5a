"""`make proof-bench`: the overhead of the benchmark client, its verdicts, and the gains of batching and prefix caching.

The first section uses a null server, which sends timestamped events without a model. The others start `quire serve`
with SmolLM2 in fp32; a slower build is simulated by steps that take a tenth longer.
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
"""Enough for a pool of about six thousand tokens."""
WARM = BenchOptions(num_warmups=0)
"""No warm-up requests, because `_warm` has run before."""


# -- the benchmark itself ----------------------------------------------------------------------------------------------


@section("client overhead")
def client_overhead(proof: Proof) -> None:
    """The delay with which the client receives an event, as a share of the gap between two events of a stream."""
    spread = _lateness(proof, phases=NUM_STREAMS)
    proof.at_most("client_overhead", spread, 0.02, "of the gap")
    proof.report("client_overhead_in_bursts", _lateness(proof, phases=1), "all streams send at the same time")


def _lateness(proof: Proof, phases: int) -> float:
    num_tokens = proof.sized(quick=48, full=400)
    setup = LoadSetup(
        requests=NUM_STREAMS, concurrency=NUM_STREAMS, prompt_tokens=32, output_tokens=num_tokens, prompts="tokens"
    )
    with started(null_command(gap_ms=GAP_MS, phases=phases)) as running:
        outcomes = _load(running, seeded(setup)).outcomes
    # Server and client share one monotonic clock: an event contains the time at which it was sent.
    delays_s = [stamp - float(piece) for one in outcomes for stamp, piece in zip(one.token_s, one.pieces, strict=True)]
    if len(delays_s) != NUM_STREAMS * num_tokens:
        raise RuntimeError(f"expected {NUM_STREAMS * num_tokens} events, got {len(delays_s)}")
    return statistics.median(delays_s) / (GAP_MS / 1000.0)


@section("verdicts")
def verdicts(proof: Proof) -> None:
    """Compare quire with itself, and with a build whose steps take a tenth longer; then the same with null servers.

    Every comparison has its own rounds.
    """
    ours = [quire_command(smollm2_directory(), memory=SMALL_MEMORY, slowdown=by) for by in (1.0, SLOWDOWN)]
    _check_verdicts(proof, "", *ours)
    _check_verdicts(proof, "null_", null_command(), null_command(slowdown=SLOWDOWN))


def _check_verdicts(proof: Proof, name: str, build: Command, slower: Command) -> None:
    with started(build) as base_server:
        _warm(base_server)
        for key, other_build, expected in (
            ("same_build_no_difference", build, SpeedVerdict.NO_DIFFERENCE),
            ("slowed_build_found", slower, SpeedVerdict.SLOWER),
        ):
            with started(other_build) as other_server:
                _warm(other_server)
                count = proof.sized(quick=1, full=NUM_VERDICTS)
                comparisons = [_compare(proof, base_server, other_server) for _ in range(count)]
            share = [base_server.verdict for base_server in comparisons].count(expected) / len(comparisons)
            proof.at_least(f"{name}{key}", share, 0.9)
            change = statistics.median(base_server.changes[0].change for base_server in comparisons)
            proof.report(f"{name}{key}_change", change, "output tokens/s")


def _warm(running: Running) -> None:
    """Send a server more tokens than its pool can hold.

    A new server gets the memory pages of its pool at the first write to each. Until it has them all, it is a few
    percent slower than one that has run for a while.
    """
    setup = LoadSetup(requests=32, concurrency=16, prompt_tokens=256, output_tokens=1, prompts="tokens")
    _load(running, seeded(setup))


def _compare(proof: Proof, a: Running, b: Running) -> Comparison:
    # Many short rounds instead of few long ones: other load on the machine then disturbs only some of them.
    setup = LoadSetup(requests=8, concurrency=8, prompt_tokens=16, output_tokens=24, prompts="tokens")
    rounds = proof.sized(quick=14, full=24)
    return compare_records(
        *run_async(measure_interleaved((a.server, b.server), seeded(setup), rounds, WARM, RunListener()))
    )


# -- batching and the prefix cache -------------------------------------------------------------------------------------


@section("batching and prefix")
def batching_and_prefix(proof: Proof) -> None:
    with started(quire_command(smollm2_directory())) as running:
        for prompt_tokens, output_tokens, bound in ((32, 128, 6.0), (256, 64, 3.5)):
            speedup = _speedup(proof, running, prompt_tokens, output_tokens)
            proof.at_least(f"batching_speedup_16_{prompt_tokens}_{output_tokens}", speedup, bound)
        prefix(proof, running)


def _speedup(proof: Proof, running: Running, prompt_tokens: int, output_tokens: int) -> float:
    """Return output tokens per second of 16 clients over those of one, in alternating rounds."""
    one_client, many_clients = list[float](), list[float]()
    for _ in range(proof.sized(quick=2, full=7)):
        for clients, rates in ((1, one_client), (16, many_clients)):
            setup = LoadSetup(
                requests=clients * proof.sized(quick=1, full=2),
                concurrency=clients,
                prompt_tokens=prompt_tokens,
                output_tokens=output_tokens,
                prompts="tokens",
            )
            result = _load(running, seeded(setup))
            rates.append(sum(one.output_tokens for one in result.outcomes) / result.duration_s)
    return statistics.median(many_clients) / statistics.median(one_client)


def prefix(proof: Proof, running: Running) -> None:
    """Compare TTFT of two requests with a new common prefix: the first computes it, the second finds it cached."""
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
    note = f"{statistics.median(cold) * 1e3:.0f} ms over {statistics.median(warm) * 1e3:.0f} ms"
    proof.equals("prefix_cached_tokens", min(cached), 1024, "of 1,056")
    proof.at_least("prefix_ttft_ratio", ratio, 10, note)


def _load(running: Running, setup: LoadSetup) -> Run:
    """Run one load; every request must succeed."""

    async def main() -> Run:
        async with Client(running.server) as client:
            bench = await Bench.open(client, WARM, RunListener())
            return (await bench.run(setup, setup.seed, ""))[1]

    result = run_async(main())
    failed = [one for one in result.outcomes if not one.is_ok]
    if failed:
        raise RuntimeError(f"{len(failed)} requests failed, the first with {failed[0].error}: {failed[0].detail}")
    return result


PATHS = ("src/quire/bench", "src/quire/engine", "src/quire/core", "src/quire/backends", "native")

if __name__ == "__main__":
    sys.exit(run("bench", paths=PATHS))
