"""First hour, 5: while a long prompt was read, load, steps, KV use and computed tokens stood still at 0."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from quire.backends.kernels.extension import availability
from quire.backends.protocol import CountsLayers
from quire.client.request.params import SamplingParams
from quire.core.request import ResolvedSampling
from quire.core.step import Sampling, StepPlan, WorkItem
from tests.support.models.models import load_runner
from tests.support.models.tiny_models import Tiny, write_gguf
from tests.support.servers.served import served
from tests.support.workers.oracle_worker import SETTINGS
from tests.unit.worker.test_supervisor import run, until


def test_steps_that_only_read_a_prompt_send_their_load() -> None:
    """The load came with events alone, and such steps have none: after the first all figures stood still."""

    async def main() -> None:
        async with served(replace(SETTINGS, max_step_tokens=68), step_s=0.3) as model:
            ids = model.text.prompt("word " * 90)
            asking = asyncio.create_task(model.generate(ids, SamplingParams(max_tokens=1)))
            seen: set[tuple[int, int, float]] = set()

            def look() -> bool:
                stats = model.stats()
                seen.add((stats.num_steps, stats.num_computed_tokens, stats.kv_usage))
                return asking.done()

            await until(look)
            await asking
            between = {one for one in seen if 0 < one[1] < len(ids)}
            assert len({num_computed for _, num_computed, _ in between}) >= 4, "of seven steps"
            assert all(num_steps and kv_usage for num_steps, _, kv_usage in between)

    run(main)


@pytest.mark.skipif(not availability().is_available, reason="counted by kernels")
def test_layers_of_a_step_are_counted_while_it_runs(tmp_path: Path) -> None:
    tiny = Tiny(hidden=128, intermediate=128, num_layers=3)
    runner = load_runner(
        write_gguf(tmp_path / "tiny.gguf", tiny), memory_bytes=4 << 30, backend="cpu", kv_dtype="float32"
    )
    assert isinstance(runner, CountsLayers)
    counter = memoryview(bytearray(8))
    assert runner.count_layers(counter) == tiny.num_layers
    sampling = Sampling(ResolvedSampling(temperature=0.0), 0, 0, 4, 4, None)
    runner.start(StepPlan(1, (), (WorkItem(1, (1, 2, 3, 4), 0, (1,), sampling),))).wait()
    assert counter.cast("Q")[0] == tiny.num_layers
