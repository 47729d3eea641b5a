"""A real worker whose clock is a million seconds off: its clients cannot tell."""

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import pytest

from quire.client.engines.served import ServedModel
from quire.client.reply.outputs import Completion
from quire.client.reply.stream import RequestHandle
from quire.client.request.params import SamplingParams
from tests.support.machine.patience import PATIENCE_S
from tests.support.servers.served import served
from tests.support.workers.oracle_worker import SETTINGS

CLOCKS = [0.0, 1_000_000.0, -1_000_000.0]
"""Seconds ahead of ours."""


def elsewhere(ahead_s: float, *, step_s: float = 0.0, **settings: int) -> ServedModel:
    command = (sys.executable, "-m", "tests.support.workers.offset_worker", str(ahead_s))
    return served(replace(SETTINGS, **settings), step_s=step_s, command=command)  # type: ignore[arg-type]


def run(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(main(), PATIENCE_S))


def params(seed: int, max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, seed=seed, ignore_eos=True)


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.005)


def ask(model: ServedModel, max_tokens: int, **options: Any) -> RequestHandle:
    """At once, and in the order of the calls."""
    return model.submit_ids(model.text.prompt("question"), params(1, max_tokens), **options)


async def whole(asked: RequestHandle) -> Completion:
    async for _ in asked:
        pass
    asked.close()
    return asked.completion()


@pytest.mark.parametrize("ahead_s", CLOCKS)
def test_who_waits_goes_by_its_head_start(ahead_s: float) -> None:
    async def main() -> None:
        async with elsewhere(ahead_s, step_s=0.01, max_running=1) as model:
            running = ask(model, 100)
            others = [ask(model, 3, priority=priority) for priority in ("low", "normal", "high")]
            low, normal, high = await asyncio.gather(*map(whole, others))
            await whole(running)
            assert high.timings.wait_s < normal.timings.wait_s < low.timings.wait_s

    run(main)


@pytest.mark.parametrize("ahead_s", CLOCKS)
def test_a_deadline_ends_what_runs_and_what_waits_and_times_are_those_that_went_by_here(ahead_s: float) -> None:
    async def main() -> None:
        async with elsewhere(ahead_s, step_s=0.01, max_running=1) as model:
            began_s = time.monotonic()
            late = await whole(ask(model, 400, timeout_s=0.3))
            asked = [ask(model, 100), ask(model, 400, timeout_s=0.1), ask(model, 5, timeout_s=PATIENCE_S)]
            first, waited, done = await asyncio.gather(*map(whole, asked))
            elapsed_s = time.monotonic() - began_s
            reasons = [one.finish_reason for one in (late, first, waited, done)]
            assert reasons == ["deadline", "length", "deadline", "length"]
            assert waited.num_output_tokens == 0
            assert late.timings.total_s >= 0.3
            for one in (late, first, waited, done):
                took = one.timings
                assert 0.0 <= took.wait_s <= took.first_token_s <= took.total_s <= elapsed_s
            assert done.timings.wait_s > first.timings.wait_s

    run(main)


@pytest.mark.parametrize("ahead_s", CLOCKS[1:])
def test_streams_go_on_when_it_is_killed_and_are_those_of_any_worker(ahead_s: float) -> None:
    async def ask_all(model: ServedModel) -> list[Completion]:
        return await asyncio.gather(*(model.generate(f"question {at}", params(at, 60)) for at in range(4)))

    async def main() -> None:
        async with served() as model:
            alone = await ask_all(model)
        async with elsewhere(ahead_s, step_s=0.01) as model:
            asking = asyncio.create_task(ask_all(model))
            await until(lambda: model.supervisor.ledger.num_progress > 40)
            os.kill(model.supervisor.pid or 0, signal.SIGKILL)
            done = await asking
            assert [one.answers for one in done] == [one.answers for one in alone]
            assert (model.supervisor.num_restarts, [one.num_replays for one in done]) == (1, [1] * 4)
            assert model.is_ready, "its beat is seen to move"

    run(main)


@pytest.mark.parametrize("ahead_s", CLOCKS)
def test_an_eviction_is_as_long_ago_as_it_was(ahead_s: float) -> None:
    async def main() -> None:
        async with elsewhere(ahead_s, memory_bytes=24, max_running=2, max_sequence_tokens=64) as model:
            began_s = time.monotonic()
            await model.generate("the first prompt", params(1, 8))
            for at in range(12):
                await model.generate(f"{at} makes room", params(at, 20))
            found = await model.explain("the first prompt")
            elapsed_s = time.monotonic() - began_s
            assert found.reason == "evicted"
            assert found.evicted_s_ago is not None
            assert 0.0 < found.evicted_s_ago < elapsed_s
            asked = await model.generate("the first prompt", params(1, 8), explain=True)
            assert asked.explanation is not None
            assert asked.explanation.evicted_s_ago is not None
            assert 0.0 < asked.explanation.evicted_s_ago < time.monotonic() - began_s

    run(main)
