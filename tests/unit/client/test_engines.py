"""The engine on the oracle: answers, streams, cancelling, and what happens when somebody goes away."""

import asyncio
import re
import threading
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest

import quire
from quire.client.engines.async_engine import AsyncEngine
from quire.client.engines.llm import LLM
from quire.client.reply.outputs import Completion, Piece, Timings
from quire.client.reply.reply import Reply
from quire.client.reply.stream import Stream
from quire.client.request.params import SamplingParams
from quire.client.request.requests import RequestOptions, make_request
from quire.core.events import (
    Admitted,
    Finished,
    FirstToken,
    Queued,
    Refused,
    RequestEvent,
    SequenceFinished,
)
from quire.core.inspect import invariants
from quire.core.request import FinishReason, PriorityClass
from quire.core.scheduling.waiting_queue import QueueConfig, WaitingQueue
from quire.engine.commands import Close
from quire.engine.engine import Clock
from quire.engine.loop import EngineThread
from quire.errors import (
    ConfigError,
    DisplacedError,
    EngineDeadError,
    InvalidParameterError,
    RequestTooLargeError,
    StreamStuckError,
    TemplateError,
)
from tests.support.errors import raises_code
from tests.support.servers.talkers import talker

PARAMS = SamplingParams(max_tokens=12, temperature=0.0)


def test_answers_come_in_the_order_of_the_prompts() -> None:
    prompts = [f"prompt number {at}" for at in range(40)]
    with LLM(talker()) as llm:
        together = [one.text for one in llm.generate(prompts, PARAMS)]
        alone = [llm.generate(prompt, PARAMS)[0].text for prompt in prompts]
    assert together == alone
    assert len(set(together)) == 40


def test_a_completion_says_what_it_cost() -> None:
    with LLM(talker()) as llm:
        cold, warm = (llm.generate("the cat sat on the mat", PARAMS)[0] for _ in range(2))
    assert cold.num_cached_tokens == 0
    assert warm.num_cached_tokens == (len(warm.prompt_token_ids) - 1) // 4 * 4 > 0
    assert warm.num_output_tokens == 12
    assert warm.finish_reason == "length"
    assert warm.tokens_per_s > 0
    assert 0 <= warm.timings.wait_s <= warm.timings.first_token_s <= warm.timings.total_s


def test_n_answers_share_a_prompt() -> None:
    with LLM(talker()) as llm:
        (completion,) = llm.generate("the cat", SamplingParams(max_tokens=8, n=3, seed=5))
        (again,) = llm.generate("the cat", SamplingParams(max_tokens=8, n=3, seed=5))
    assert len({answer.token_ids for answer in completion.answers}) == 3
    assert completion.answers == again.answers
    assert completion.seed == 5


def test_a_stop_text_ends_an_answer_and_its_request() -> None:
    with LLM(talker()) as llm:
        whole = llm.generate("tell me", SamplingParams(max_tokens=40, temperature=0.0))[0]
        middle = len(whole.text) // 2
        stop = whole.text[middle : middle + 3]
        (cut,) = llm.generate("tell me", SamplingParams(max_tokens=40, temperature=0.0, stop=(stop,)))
        (shown,) = llm.generate("tell me", SamplingParams(max_tokens=40, temperature=0.0, stop=stop, include_stop=True))
    assert cut.text == whole.text[: whole.text.index(stop)]
    assert shown.text == cut.text + stop
    assert (cut.finish_reason, cut.answers[0].stop_reason) == ("stop", stop)
    assert cut.token_ids == whole.token_ids[: len(cut.token_ids)]
    assert len(cut.token_ids) < 40


def test_a_stop_token_is_counted_and_not_shown() -> None:
    with LLM(talker()) as llm:
        whole = llm.generate("tell me", SamplingParams(max_tokens=20, temperature=0.0))[0]
        # Stop tokens change what the oracle says, so ask until one of its own tokens stops it.
        params = SamplingParams(max_tokens=400, temperature=0.0, stop_token_ids=tuple(range(40, 90)))
        (cut,) = llm.generate("tell me", params)
    assert whole.finish_reason == "length"
    assert cut.finish_reason == "stop"
    assert cut.answers[0].stop_reason == cut.token_ids[-1] in range(40, 90)
    assert cut.text == LLM(talker()).text.tokenizer.decode(cut.token_ids[:-1])


def test_a_chat_goes_through_the_template() -> None:
    with LLM(talker()) as llm:
        (completion,) = llm.chat([{"role": "user", "content": "hello"}], PARAMS)
        assert llm.text.tokenizer.decode(completion.prompt_token_ids) == "<user>hello\n<assistant>"
        assert len(llm.chat([[{"role": "user", "content": "a"}], [{"role": "user", "content": "b"}]], PARAMS)) == 2


def test_a_stream_left_early_leaves_nothing_behind() -> None:
    opened = talker()
    llm = LLM(opened)
    pieces = llm.stream("go on for ever", SamplingParams(max_tokens=400, ignore_eos=True))
    first = [next(pieces) for _ in range(3)]
    assert all(isinstance(piece, Piece) for piece in first)
    pieces.close()  # type: ignore[attr-defined]
    assert not opened.engine.scheduler.live
    invariants.check_at_rest(opened.engine.memory)


def test_a_stream_joined_is_the_answer() -> None:
    with LLM(talker()) as llm:
        *pieces, last = llm.stream("the cat", PARAMS)
        assert isinstance(last, Completion)
        assert "".join(piece.text for piece in pieces if isinstance(piece, Piece)) == last.text
        assert last.text == llm.generate("the cat", PARAMS)[0].text


@pytest.mark.parametrize(("prompt", "error"), [
    ("", RequestTooLargeError), ([], RequestTooLargeError), ([10_000_000], InvalidParameterError),
    ([-1], InvalidParameterError), ("x" * 5_000, RequestTooLargeError), ("y z " * 900, RequestTooLargeError),
])  # fmt: skip
def test_a_prompt_that_cannot_be_served_is_refused_at_once(prompt: str, error: type[Exception]) -> None:
    with LLM(talker()) as llm, pytest.raises(error):
        llm.generate([prompt], PARAMS)


def test_params_must_fit_the_prompts() -> None:
    with LLM(talker()) as llm, pytest.raises(ConfigError) as refused:
        llm.generate(["a", "b"], [PARAMS])
    assert refused.value.settings == ("params",)


def test_a_model_without_a_template_says_what_to_do() -> None:
    opened = talker()
    bare = replace(opened, text=replace(opened.text, template=None))
    with LLM(bare) as llm, raises_code(TemplateError, "template_missing"):
        llm.chat([{"role": "user", "content": "hello"}])


def test_sixty_four_callers_get_what_each_would_get_alone() -> None:
    random = Random(1)
    heats = [random.choice([0.0, 1.0]) for _ in range(64)]
    asks = [
        (f"question {at}", SamplingParams(max_tokens=random.randint(1, 30), seed=at, temperature=heat))
        for at, heat in enumerate(heats)
    ]

    async def ask() -> list[str]:
        async with AsyncEngine(talker()) as engine:
            done = await asyncio.gather(*(engine.generate(*one) for one in asks))
        return [one.text for one in done]

    with LLM(talker()) as llm:
        alone = [llm.generate(prompt, params)[0].text for prompt, params in asks]
    assert asyncio.run(ask()) == alone


def test_consumers_that_leave_at_any_moment_hold_no_block() -> None:
    opened = talker()

    async def come_and_go(engine: AsyncEngine, random: Random) -> None:
        stream = engine.stream(f"question {random.random()}", SamplingParams(max_tokens=50, n=random.choice([1, 1, 3])))
        count = random.randint(0, 20)
        async for _ in stream:
            count -= 1
            if count <= 0:
                break
        await stream.aclose()  # type: ignore[attr-defined]

    async def crowd() -> None:
        async with AsyncEngine(opened) as engine:
            tasks = [asyncio.create_task(come_and_go(engine, Random(at))) for at in range(60)]
            for task in tasks[::7]:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            final = await engine.generate("still there?", PARAMS)
            assert final.num_output_tokens == 12

    asyncio.run(crowd())
    invariants.check_at_rest(opened.engine.memory)


def test_a_dead_engine_tells_everybody_who_waits_and_who_comes_later() -> None:
    async def ask() -> None:
        async with AsyncEngine(talker(fails_at=5)) as engine:
            waiting = [
                engine.generate(f"question {at}", SamplingParams(max_tokens=50, ignore_eos=True)) for at in range(4)
            ]
            done = await asyncio.gather(*waiting, return_exceptions=True)
            assert all(isinstance(one, EngineDeadError) for one in done)
            assert any("the device is gone" in str(one) for one in done)
            with pytest.raises(EngineDeadError):
                await engine.generate("anybody?", PARAMS)

    asyncio.run(ask())


def test_a_request_that_comes_too_late_for_the_last_step_is_refused_and_not_forgotten() -> None:
    opened = talker()
    heard: list[RequestEvent] = []
    stepper = EngineThread(opened.engine, heard.extend, lambda _error: None)
    request = make_request(opened.text, opened.text.prompt("hello"), PARAMS)
    stepper.commands.put(Close())
    stepper.submit(request)
    stepper.start()
    stepper.thread.join()
    stepper.submit(request)
    assert [type(one.error) for one in heard if isinstance(one, Refused)] == [EngineDeadError] * 2


def test_what_was_obeyed_just_before_the_end_is_told() -> None:
    opened = talker()
    heard: list[RequestEvent] = []
    thread = EngineThread(opened.engine, heard.extend, lambda _error: None)
    request = make_request(opened.text, opened.text.prompt("hello"), PARAMS)
    thread.submit(request)
    thread.commands.put(Close())
    thread.start()
    thread.thread.join()
    assert heard == [Queued(request.request_id)]


def test_a_deadline_ends_a_request_with_what_it_has() -> None:
    async def ask() -> Completion:
        async with AsyncEngine(talker()) as engine:
            return await engine.generate(
                "slow", SamplingParams(max_tokens=400), timeout_s=0.0, priority=PriorityClass.HIGH
            )

    assert asyncio.run(ask()).finish_reason == "deadline"


def test_an_engine_must_be_entered() -> None:
    with raises_code(ConfigError, "engine_not_entered"):
        asyncio.run(AsyncEngine(talker()).generate("x"))


def test_no_thread_outlives_the_engine() -> None:
    async def enter_and_leave() -> None:
        async with AsyncEngine(talker()) as engine:
            await engine.chat([{"role": "user", "content": "hello"}], PARAMS)

    asyncio.run(enter_and_leave())
    assert not [thread for thread in threading.enumerate() if thread.name == "quire-steps"]


def test_a_stream_nobody_reads_is_ended() -> None:
    async def fill() -> tuple[list[str], str]:
        cancelled: list[str] = []
        stream = Stream("r1", cancelled.append, max_pending=5, max_bytes=40)
        for at in range(24):
            stream.put([Piece(0, str(at % 10))])
        kept = [await anext(stream) for _ in range(len(stream._pieces))]
        with pytest.raises(StreamStuckError) as stuck:
            await anext(stream)
        assert stuck.value.limit == 40
        assert len(kept) <= 5
        return cancelled, "".join(piece.text for piece in kept)

    assert asyncio.run(fill()) == (["r1"], "01234567890123456789")


def test_what_nobody_has_read_is_joined_answer_by_answer() -> None:
    async def fill() -> list[Piece]:
        stream = Stream("r1", lambda _name: None, max_pending=4)
        for at in range(6):
            stream.put([Piece(at % 2, str(at), (at,))])
        stream.put([Piece(1, "", finish_reason="stop")])
        taken = stream.take()
        assert (stream.take(), stream._num_bytes, stream.is_over) == ([], 0, False)
        return taken

    assert asyncio.run(fill()) == [Piece(0, "024", (0, 2, 4)), Piece(1, "135", (1, 3, 5), finish_reason="stop")]


def test_a_stream_that_is_stopped_cancels_and_tells_why_after_what_it_has() -> None:
    async def stop() -> list[str]:
        cancelled: list[str] = []
        stream = Stream("r1", cancelled.append)
        stream.put([Piece(0, "a")])
        stream.stop(EngineDeadError("over"))
        assert [piece.text for piece in stream.take()] == ["a"]
        with raises_code(EngineDeadError, "engine_dead"):
            stream.take()
        return cancelled

    assert asyncio.run(stop()) == ["r1"]


def test_a_consumer_that_goes_away_cancels_once() -> None:
    async def leave() -> list[str]:
        cancelled: list[str] = []
        stream = Stream("r1", cancelled.append)
        stream.put([Piece(0, "a")])
        stream.close()
        stream.close()
        stream.put([Piece(0, "b")])
        assert [piece async for piece in stream] == []
        return cancelled

    assert asyncio.run(leave()) == ["r1"]


def test_a_request_says_whether_texts_may_end_it() -> None:
    text = talker().text
    assert make_request(text, [1, 2], SamplingParams(stop=("end",))).has_stop_texts
    assert not make_request(text, [1, 2], SamplingParams(stop_token_ids=(3,))).has_stop_texts


def test_the_public_names_are_these_and_all_can_be_had() -> None:
    names = ["LLM", "Answer", "AsyncEngine", "Completion", "Difference", "Explanation", "Grammar", "ModelSettings",
             "Piece", "QuireError", "SamplingParams", "Timings", "__version__"]  # fmt: skip
    assert quire.__all__ == names
    page = (Path(__file__).parents[3] / "docs/guides/python.md").read_text().partition("## The public names")[2]
    assert re.findall(r"^\| `(\w+)` \|", page, flags=re.MULTILINE) == names, "as the guide lists them"
    assert all(getattr(quire, name) is not None for name in names)
    with pytest.raises(AttributeError):
        _ = quire.nonsense


@pytest.mark.parametrize("given", [
    {"temperature": -1.0}, {"temperature": float("nan")}, {"temperature": True}, {"top_p": 1.5}, {"top_k": 2.5},
    {"max_tokens": 0}, {"n": 9}, {"n": 0}, {"logprobs": 21}, {"stop": ("",)}, {"stop": ("a", "b", "c", "d", "e")},
    {"logit_bias": {1: float("inf")}}, {"repetition_penalty": 0.0}, {"seed": "x"}, {"stop": (3,)},
])  # fmt: skip
def test_parameters_that_break_a_rule_are_refused(given: dict[str, object]) -> None:
    with pytest.raises(InvalidParameterError):
        SamplingParams(**given)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "given", [{"stop_token_ids": (10_000,)}, {"logit_bias": {-1: 1.0}}, {"banned_token_ids": ("a",)}]
)
def test_tokens_outside_the_vocabulary_are_refused(given: dict[str, object]) -> None:
    with LLM(talker()) as llm, pytest.raises(InvalidParameterError) as refused:
        llm.generate("hello", SamplingParams(**given))  # type: ignore[arg-type]
    assert refused.value.parameter == next(iter(given))


def test_no_tokens_may_be_asked_for_where_the_prompts_own_logprobs_are_wanted() -> None:
    opened = talker()
    with LLM(opened) as llm:
        (done,) = llm.generate(["hello"], SamplingParams(max_tokens=0, prompt_logprobs=1))
        (answered,) = llm.generate(["hello"], SamplingParams(max_tokens=1, prompt_logprobs=1))
    assert (done.text, done.num_output_tokens, done.finish_reason) == ("", 0, "length")
    assert len(done.prompt_logprobs) == len(done.prompt_token_ids) - 1
    assert done.prompt_logprobs == answered.prompt_logprobs
    assert opened.engine.scheduler.stats.num_output_tokens == 1
    with pytest.raises(InvalidParameterError) as refused:
        SamplingParams(max_tokens=0)
    assert refused.value.parameter == "max_tokens"


def test_the_models_own_settings_are_the_defaults() -> None:
    settled = SamplingParams(top_p=0.5).resolve({"temperature": 0.2, "top_p": 0.9}, frozenset({3, 400}), 300)
    assert (settled.temperature, settled.top_p, settled.top_k) == (0.2, 0.5, 0)
    assert settled.stop_token_ids == {3}
    assert SamplingParams(ignore_eos=True, stop_token_ids=(5,)).resolve({}, frozenset({3}), 300).stop_token_ids == {5}


@pytest.mark.parametrize("given", [
    {"stop": 5}, {"logit_bias": [(1, 2)]}, {"logit_bias": {1: "x"}}, {"allowed_token_ids": 5}, {"seed": 10**400},
    {"temperature": 10**400}, {"ignore_eos": "no"}, {"allowed_token_ids": []}, {"min_tokens": 9, "max_tokens": 4},
    {"banned_token_ids": "abc"}, {"stop_token_ids": range(1 << 20)},
])  # fmt: skip
def test_whatever_is_passed_a_wrong_parameter_is_a_refusal_and_not_a_crash(given: dict[str, object]) -> None:
    with pytest.raises(InvalidParameterError):
        SamplingParams(**given)  # type: ignore[arg-type]


def test_none_is_nothing_and_a_generator_is_read_once() -> None:
    empty: dict[str, Any] = {"stop": None, "logit_bias": None, "banned_token_ids": None}
    params = SamplingParams(**empty, stop_token_ids=(x for x in (3, 3, 4)))  # type: ignore[arg-type]
    settled = params.resolve({}, frozenset(), 300)
    assert settled.stop_token_ids == params.resolve({}, frozenset(), 300).stop_token_ids == {3, 4}
    assert (settled.logit_bias, settled.banned_token_ids, params.stop) == ((), (), ())


@pytest.mark.parametrize("how", [
    {"priority": "urgent"}, {"tenant": ["a"]}, {"tenant": ""}, {"timeout_s": float("nan")}, {"timeout_s": -1},
    {"timeout_s": True}, {"cache_group": 3}, {"nonsense": 1}, {"adapter": 3}, {"adapter": "a"},
])  # fmt: skip
def test_one_callers_mistake_is_told_to_that_caller_alone(how: dict[str, Any]) -> None:
    async def ask() -> Completion:
        async with AsyncEngine(talker()) as engine:
            with pytest.raises(InvalidParameterError):
                await engine.generate("hi", PARAMS, **how)
            with pytest.raises(InvalidParameterError):
                await engine.chat([{"role": "user", "content": "hi"}], PARAMS, **how)
            return await engine.generate("hi", PARAMS, priority="high", tenant="a")

    assert asyncio.run(ask()).num_output_tokens == 12


def test_an_adapter_names_blocks_of_its_own_and_one_that_is_not_there_is_refused() -> None:
    opened = talker()
    ids = opened.text.prompt("hello")
    plain, adapted = (make_request(opened.text, ids, PARAMS, RequestOptions(adapter=name)) for name in ("", "a"))
    assert plain.namespace == make_request(opened.text, ids, PARAMS).namespace
    assert (adapted.adapter, adapted.namespace.adapter) == ("a", "a")
    with pytest.raises(InvalidParameterError) as refused:
        opened.engine.check(adapted)
    assert refused.value.parameter == "adapter"


def test_a_chat_can_be_streamed_and_carries_what_is_said_of_it() -> None:
    messages = [{"role": "user", "content": "hello"}]

    async def ask() -> tuple[str, str, str]:
        async with AsyncEngine(talker()) as engine:
            pieces = [piece async for piece in engine.stream_chat(messages, PARAMS, tenant="a")]
            whole = await engine.chat(messages, PARAMS)
            late = await engine.chat(messages, SamplingParams(max_tokens=400), timeout_s=0.0)
            return "".join(piece.text for piece in pieces), whole.text, late.finish_reason

    streamed, whole, reason = asyncio.run(ask())
    assert streamed == whole
    assert reason == "deadline"


def test_a_tokenizer_that_knows_more_than_the_model_cannot_kill_the_engine() -> None:
    opened = talker()
    narrow = replace(opened.text, info=replace(opened.text.info, vocabulary_size=5))
    with LLM(replace(opened, text=narrow)) as llm, raises_code(InvalidParameterError, "invalid_token_ids"):
        llm.chat([{"role": "user", "content": "hello"}], PARAMS)


@pytest.mark.parametrize("prompt", [[1.0, 2.0], [True], ["a"], 7])
def test_ids_must_be_whole_numbers(prompt: Any) -> None:
    opened = talker()
    with LLM(opened) as llm:
        with pytest.raises(InvalidParameterError):
            llm.generate([prompt], PARAMS)
        assert not opened.engine.scheduler.live
        assert llm.generate("hello", PARAMS)[0].num_output_tokens == 12


def test_a_step_that_is_broken_off_fails_its_rows_and_not_the_engine() -> None:
    opened = talker(fails_at=3)
    llm = LLM(opened)
    with pytest.raises(RuntimeError):
        llm.generate("hello", PARAMS)
    opened.engine.runner._fails_at = 10**9  # type: ignore[attr-defined]
    assert llm.generate("hello", PARAMS)[0].num_output_tokens == 12
    invariants.check_at_rest(opened.engine.memory)


def test_two_streams_at_once_do_not_mix() -> None:
    with LLM(talker()) as llm:
        alone = [llm.generate(prompt, PARAMS)[0].text for prompt in ("the cat", "a dog")]
        texts = ["", ""]
        streams = [llm.stream("the cat", PARAMS), llm.stream("a dog", PARAMS)]
        pieces = [next(stream) for stream in streams]
        assert llm.generate("somebody else", SamplingParams(max_tokens=50, ignore_eos=True))[0].num_output_tokens == 50
        while any(isinstance(piece, Piece) for piece in pieces):
            for at, piece in enumerate(pieces):
                if isinstance(piece, Piece):
                    texts[at] += piece.text
                    pieces[at] = next(streams[at])
    assert texts == alone


def test_a_bad_prompt_is_found_before_anything_is_computed() -> None:
    opened = talker()
    with LLM(opened) as llm, pytest.raises(RequestTooLargeError):
        llm.generate([*([[4]] * 300), [5] * 600], PARAMS)
    assert opened.engine.scheduler.stats.num_steps == 0


def test_a_request_is_told_after_its_first_step_how_long_ago_it_was_admitted() -> None:
    clock = iter((100.0, 107.5))
    opened = talker()
    opened.engine.submit(
        msgspec.structs.replace(make_request(opened.text, opened.text.prompt("hi"), PARAMS), arrival_s=98.0)
    )
    (admitted,) = [one for one in opened.engine.step(lambda: next(clock)) if isinstance(one, Admitted)]
    assert (admitted.wait_s, admitted.age_s) == (2.0, 7.5)


def test_times_are_of_the_clock_of_whoever_hears_and_go_back_by_what_an_event_says() -> None:
    clock, opened = iter((20.0, 21.0, 30.0)), talker()
    request = msgspec.structs.replace(make_request(opened.text, opened.text.prompt("hi"), PARAMS), arrival_s=10.0)
    reply = Reply(request, PARAMS, opened.text.tokenizer, lambda: next(clock))
    name = request.request_id
    reply.take([Queued(name), Admitted(name, 4.0, 0.5, 0), FirstToken(name, 0)])
    reply.take([SequenceFinished(name, 0, FinishReason.LENGTH, 0, None), Finished(name, 2, 0, 0)])
    assert reply.timings == Timings(wait_s=6.0, first_token_s=11.0, total_s=20.0)


def test_an_engine_whose_owner_is_cancelled_still_tells_everybody() -> None:
    async def own() -> BaseException | Completion:
        engine = AsyncEngine(talker())
        await engine.__aenter__()
        waiting = asyncio.create_task(engine.generate("hi", SamplingParams(max_tokens=400)))
        await asyncio.sleep(0)
        closing = asyncio.create_task(engine.__aexit__(None, None, None))
        await asyncio.sleep(0)
        closing.cancel()
        (done,) = await asyncio.gather(waiting, return_exceptions=True)
        return done

    assert isinstance(asyncio.run(own()), EngineDeadError | Completion)


def test_a_prompt_that_was_displaced_is_an_error_to_who_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = talker(max_running=1)
    opened.engine.scheduler.queue = WaitingQueue(QueueConfig(max_requests=2, class_reserve=0.0))
    other = make_request(opened.text, [40], SamplingParams(max_tokens=1), RequestOptions(tenant="other"))
    with LLM(opened) as llm:
        really = opened.engine.step

        def step(clock: Clock) -> list[RequestEvent]:
            monkeypatch.undo()
            opened.engine.submit(other)
            return really(clock)

        monkeypatch.setattr(opened.engine, "step", step)
        with pytest.raises(DisplacedError) as displaced:
            llm.generate(["one", "two"], SamplingParams(max_tokens=3))
        assert displaced.value.retry_after_s == 10
        assert llm.generate("three", SamplingParams(max_tokens=3))[0].num_output_tokens == 3
