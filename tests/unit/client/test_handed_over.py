"""A stream that goes on at another engine: the text behind the seam begins with the next character."""

import asyncio
import os
import signal
from dataclasses import replace

import msgspec
import pytest

from quire.client.engines.async_engine import AsyncEngine
from quire.client.engines.client import EngineClient
from quire.client.reply.outputs import Answer, Completion
from quire.client.request.params import SamplingParams
from quire.client.request.requests import make_request
from quire.core.request import Continuation
from quire.text.detokenizer import AnswerText, Detokenizer
from tests.support.machine.patience import PATIENCE_S
from tests.support.servers.served import served
from tests.support.servers.talkers import talker

PROMPT = "question 7"
LENGTH = 24


def asked(*stop: str) -> SamplingParams:
    return SamplingParams(max_tokens=LENGTH, seed=7, temperature=1.0, ignore_eos=True, logprobs=1, n=2, stop=stop)


async def alone(params: SamplingParams) -> Completion:
    async with AsyncEngine(talker()) as engine:
        return await engine.generate(PROMPT, params)


def begun(whole: Completion, num_tokens: int, params: SamplingParams) -> Completion:
    """As far as a client got who had so many tokens of each answer when its engine was gone."""
    return replace(whole, answers=tuple(cut(one, num_tokens, params) for one in whole.answers))


def cut(answer: Answer, num_tokens: int, params: SamplingParams) -> Answer:
    """One that had ended by then is whole."""
    if len(answer.token_ids) <= num_tokens:
        return answer
    tokenizer = talker().text.tokenizer
    text = AnswerText(tokenizer, (), params.stop) if params.stop else Detokenizer(tokenizer, ())
    return replace(
        answer,
        text="".join(text.push(token_id) for token_id in answer.token_ids[:num_tokens]),
        token_ids=answer.token_ids[:num_tokens],
        logprobs=answer.logprobs[:num_tokens],
        finish_reason="cancelled",
        stop_reason=None,
    )


async def went_on(client: EngineClient, first: Completion, params: SamplingParams, *, dies: bool = False) -> Completion:
    """Ask another engine for the rest, and put both together."""
    left = tuple(Continuation(one.index, one.token_ids) for one in first.answers if one.finish_reason == "cancelled")
    if not left:
        return first
    whole = make_request(client.text, await client.prompt_ids(PROMPT), params)
    request = msgspec.structs.replace(whole, continuations=left)
    asking = client.submit(request, params)
    async for _ in asking:
        if dies:
            dies = False
            os.kill(client.supervisor.pid or 0, signal.SIGKILL)  # type: ignore[attr-defined]
    asking.close()
    rest = {one.index: one for one in asking.completion().answers}
    answers = tuple(joined(one, rest[one.index]) if one.index in rest else one for one in first.answers)
    return replace(first, answers=answers)


def joined(first: Answer, rest: Answer) -> Answer:
    return replace(
        rest,
        text=first.text + rest.text,
        token_ids=first.token_ids + rest.token_ids,
        logprobs=first.logprobs + rest.logprobs,
    )


def test_wherever_the_seam_is_text_tokens_and_logprobs_are_those_of_one_engine() -> None:
    async def main() -> None:
        whole = await alone(asked())
        async with AsyncEngine(talker()) as engine:
            for num_tokens in range(LENGTH):
                again = await went_on(engine, begun(whole, num_tokens, asked()), asked())
                assert again.answers == whole.answers

    asyncio.run(asyncio.wait_for(main(), PATIENCE_S))


@pytest.mark.parametrize("dies", [False, True])
def test_a_stop_string_across_the_seam_ends_the_answer_where_it_would_have_ended(dies: bool) -> None:
    async def main() -> None:
        free = (await alone(asked())).answers[0].text
        stop = free[len(free) // 2 : len(free) // 2 + 5]
        whole = await alone(asked(stop))
        assert whole.answers[0].stop_reason == stop
        end = len(whole.answers[0].token_ids)
        async with served(step_s=0.002) as model:
            for num_tokens in range(max(1, end - 5), end):
                again = await went_on(model, begun(whole, num_tokens, asked(stop)), asked(stop), dies=dies)
                assert again.answers == whole.answers

    asyncio.run(asyncio.wait_for(main(), PATIENCE_S))
