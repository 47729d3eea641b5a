"""A smoke test of speed: ratios within one run, never seconds, and of processor time, which no neighbour can take.

What these would catch is a batch that runs one by one, a cache that is computed again, a client that is what it
measures. How fast things are is for `benchmarks/`.
"""

import asyncio
import statistics
import time

import pytest

from benchmarks.null_server import Manner, null_server
from quire.bench.engine import EngineBench, EngineLoad
from quire.bench.http_client import Client
from quire.bench.outcome import Run
from quire.bench.runs import Bench, BenchOptions, RunListener
from quire.bench.setup import LoadSetup
from quire.client.engines.opening import open_model
from quire.config import ModelSettings
from quire.http_client import ServerAddress
from tests.support.machine.process_memory import budget_bytes
from tests.support.models.tiny_models import Tiny, write_gguf

LOAD = EngineLoad((1, 16), prompt_tokens=64, output_tokens=24, prefix_tokens=448, num_rounds=5, has_roof=False)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> EngineBench:
    path = tmp_path_factory.mktemp("perf") / "tiny.gguf"
    write_gguf(path, Tiny(hidden=256, intermediate=512, num_layers=4, metadata={"llama.context_length": 1024}))
    # A budget is the whole process's, and other tests have left theirs in it.
    settings = ModelSettings(memory_bytes=budget_bytes(1 << 30), max_sequence_tokens=1024, num_threads=1)
    return EngineBench(open_model(str(path), settings), LOAD, None, "tiny")


def test_batching_and_the_prefix_cache_give_what_they_are_for(
    bench: EngineBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    for clock in ("bench.engine.perf_counter", "client.engines.llm.monotonic", "client.request.requests.monotonic"):
        monkeypatch.setattr(f"quire.{clock}", time.process_time)
    with bench:
        result = bench.run(lambda _: None)
    assert result.batches[1].speedup > 2.0
    assert result.prefix_ttft_ratio is not None
    assert result.prefix_ttft_ratio > 2.0


def test_the_client_is_early_beside_the_gaps_it_measures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sender and reader share one thread: what it spends between two stamps is what the client adds."""
    for clock in ("benchmarks.null_server.stamp", "quire.bench.http_client.perf_counter"):
        monkeypatch.setattr(clock, time.thread_time)
    setup = LoadSetup(requests=16, concurrency=16, prompt_tokens=8, output_tokens=20, prompts="tokens", seed="1")

    async def main() -> Run:
        async with null_server(Manner(gap_s=0.03, num_phases=16)) as url, Client(ServerAddress.parse(url)) as client:
            return (await (await Bench.open(client, BenchOptions(), RunListener())).run(setup, "1", ""))[1]

    run = asyncio.run(main())
    late = [stamp - float(piece) for one in run.outcomes for stamp, piece in zip(one.token_s, one.pieces, strict=True)]
    assert statistics.median(late) < 0.2 * 0.03
