"""Why a prompt is not in the cache, in the asker's words: an engine in this process, and a worker that may die."""

import asyncio
import os
import signal
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest

from quire.client.engines import client
from quire.client.engines.async_engine import AsyncEngine
from quire.client.engines.llm import LLM
from quire.client.prefix.explanation import explanation, namespace_differences
from quire.client.request.params import SamplingParams
from quire.core.divergence import Divergence, MissReason
from quire.core.request import Request, ResolvedSampling
from quire.errors import CapacityError, EngineDeadError
from tests.support.errors import raises_code
from tests.support.machine.patience import PATIENCE_S
from tests.support.servers.served import served
from tests.support.servers.talkers import paced_talker, talker

TEXT = "the cat sat on the mat and looked at the dog, who did not look back at all"
OTHER = TEXT.replace("mat", "rug")
SHORT = SamplingParams(max_tokens=2, temperature=0.0)


def run(work: Any) -> Any:
    async def bounded() -> Any:
        async with asyncio.timeout(PATIENCE_S):
            return await work()

    return asyncio.run(bounded())


def test_in_process_a_prompt_is_first_seen_then_found_then_different() -> None:
    with LLM(talker()) as llm:
        assert llm.explain(TEXT).reason == "first_seen"
        llm.generate(TEXT, SHORT)
        again = llm.explain(TEXT)
        assert (again.reason, again.num_prompt_tokens) == ("too_short", len(llm.text.prompt(TEXT)))
        assert again.num_cached_tokens == (again.num_prompt_tokens - 1) // 4 * 4
        found = llm.explain(OTHER)
        ours, theirs = llm.text.prompt(OTHER), llm.text.prompt(TEXT)
        at = next(at for at, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1])
        assert (found.reason, found.position) == ("diverged", at)
        assert found.difference is not None
        assert (found.difference.token_id, found.difference.cached_token_id) == (ours[at], theirs[at])
        assert found.difference.before + found.difference.after in OTHER
        assert found.difference.before + found.difference.cached_after in TEXT
        assert f"at token {at}" in found.sentence


def test_a_completion_says_why_where_it_was_asked_to() -> None:
    async def work() -> None:
        async with AsyncEngine(talker()) as engine:
            first = await engine.generate(TEXT, SHORT, explain=True)
            plain = await engine.generate(TEXT, SHORT)
            other = await engine.generate(OTHER, SHORT, explain=True)
            assert first.explanation is not None
            assert first.explanation.reason == "first_seen"
            assert plain.explanation is None
            assert other.explanation is not None
            assert other.explanation.reason == "diverged"
            theirs = await engine.explain(TEXT, tenant="someone else")
            assert (theirs.num_cached_tokens, theirs.reason) == (0, "first_seen")
            assert (await engine.explain(TEXT)).reason == "too_short"
            assert (await engine.explain(TEXT, cache_group="default")).reason == "too_short"

    run(work)


def test_explains_are_bounded_while_a_step_holds_them_up() -> None:
    async def work() -> None:
        opened, runner = paced_talker()
        async with AsyncEngine(opened) as engine:
            running = asyncio.create_task(engine.generate(TEXT, SHORT))
            await asyncio.to_thread(runner.is_waiting.wait, PATIENCE_S)
            waiting = [asyncio.create_task(engine.explain(TEXT)) for _ in range(client.MAX_CALLS)]
            while len(engine._calls) < client.MAX_CALLS:
                await asyncio.sleep(0)
            gone = waiting.pop()
            gone.cancel()
            with pytest.raises(asyncio.CancelledError):
                await gone
            with raises_code(CapacityError, "too_many_queries"):
                await engine.explain(TEXT)
            block = asyncio.create_task(engine.block(1))
            runner.let_go()
            assert {(await one).reason for one in waiting} <= {"computing", "too_short"}
            await running
            assert (await block) is not None, "queries of another kind are counted apart"
            assert (await engine.explain(TEXT)).reason == "too_short"

    run(work)


def test_an_engine_that_has_stopped_says_so() -> None:
    async def work() -> None:
        async with AsyncEngine(talker(fails_at=1)) as engine:
            with pytest.raises(EngineDeadError):
                await engine.generate(TEXT, SHORT)
            with pytest.raises(EngineDeadError):
                await engine.explain(TEXT)

    run(work)


def test_a_worker_answers_and_one_that_dies_leaves_nobody_waiting() -> None:
    """The question is lost with the worker, and whoever asked is told; the next worker can be asked anew."""

    async def work() -> None:
        async with served() as model:
            assert (await model.explain(TEXT)).reason == "first_seen"
            await model.generate(TEXT, SHORT)
            assert (await model.explain(OTHER)).reason == "diverged"
            pid = model.supervisor.pid
            assert pid is not None
            os.kill(pid, signal.SIGSTOP)
            asked = asyncio.create_task(model.explain(TEXT))
            while not len(model.supervisor._calls):
                await asyncio.sleep(0)
            os.kill(pid, signal.SIGKILL)
            with raises_code(EngineDeadError, "engine_dead"):
                await asked
            while not model.is_ready:
                with suppress(EngineDeadError):  # also while there is no worker at all
                    await model.explain(TEXT)
                await asyncio.sleep(0.01)
            assert (await model.explain(TEXT)).reason == "first_seen"

    run(work)


@pytest.mark.parametrize("named", [{"model": "m2"}, {"adapter": "a2"}, {"kv_layout": "l2"}])
def test_another_namespace_is_told_by_what_differs(named: dict[str, str]) -> None:
    opened = talker()
    ours = opened.text.info.namespace("group")
    other = replace(ours, **named)  # type: ignore[arg-type]
    part = next(iter(named)).replace("kv_layout", "format")
    assert namespace_differences(ours, other) == (part,)
    found = Divergence(0, MissReason.OTHER_NAMESPACE, other_namespace=other)
    told = explanation(opened.text.tokenizer, ours, [1, 2, 3], found)
    assert told.sentence == f"the same tokens are cached, but for another {part}"


def test_an_eviction_is_told_by_how_long_ago_it_was() -> None:
    opened = talker()
    for seconds, words in ((3.0, "3.0 s ago"), (90.0, "1.5 min ago"), (7200.0, "2.0 h ago")):
        found = Divergence(4, MissReason.EVICTED, evicted_s_ago=seconds)
        told = explanation(opened.text.tokenizer, opened.text.info.namespace("group"), [1] * 9, found)
        assert told.evicted_s_ago == seconds
        assert words in told.sentence


def test_an_engine_that_has_nothing_to_do_still_knows_how_long_ago_an_eviction_was() -> None:
    opened = talker(num_blocks=16)
    engine, space = opened.engine, opened.text.info.namespace("group")
    first, other = tuple(range(1, 18)), tuple(range(101, 118))
    for name, prompt in (("r1", first), ("r2", other), ("r3", other[1:]), ("r4", other[2:])):
        engine.submit(Request(name, prompt, space, 100.0, ResolvedSampling(max_tokens=8)))
        while engine.has_work:
            engine.step(lambda: 100.0)
    found = engine.explain(space, first, 130.0)
    assert (found.reason, found.evicted_s_ago) == (MissReason.EVICTED, 30.0)
