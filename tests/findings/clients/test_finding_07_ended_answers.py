"""With several answers and stop strings, an answer that has ended is not computed on."""

import asyncio
from collections.abc import Sequence

from quire.backends.protocol import PendingStep, Runner
from quire.client.engines.llm import LLM
from quire.client.request.params import SamplingParams
from quire.core.step import StepPlan
from tests.support.servers.local_api import LiveServer, house
from tests.support.servers.talkers import talker

NUM_ANSWERS = 8
MAX_TOKENS = 60
NUM_LATE = 2
"""Tokens of an answer that may be computed while its end is on its way."""


class InStep:
    """A runner that begins no step before the event loop has heard of the one before: so counts are exact."""

    def __init__(self, runner: Runner, loop: asyncio.AbstractEventLoop) -> None:
        self._runner = runner
        self._loop = loop
        self.capacity = runner.capacity

    def start(self, plan: StepPlan) -> PendingStep:
        asyncio.run_coroutine_threadsafe(asyncio.sleep(0), self._loop).result(timeout=60)
        return self._runner.start(plan)

    def read_blocks(self, block_ids: Sequence[int]) -> list[bytes]:
        return self._runner.read_blocks(block_ids)

    def write_blocks(self, block_ids: Sequence[int], data: Sequence[bytes]) -> None:
        self._runner.write_blocks(block_ids, data)

    def close(self) -> None:
        self._runner.close()


def answers(here: LiveServer, **fields: object) -> tuple[list[str], int, int]:
    """The texts, and tokens of prompt and output as they are billed."""
    body = {"model": "oracle", "prompt": "hello", "n": NUM_ANSWERS, "max_tokens": MAX_TOKENS, "seed": 5, **fields}
    told = here.post("/v1/completions", {**body, "ignore_eos": True}).json
    used = told["usage"]
    return [one["text"] for one in told["choices"]], used["prompt_tokens"], used["completion_tokens"]


def stops_of(texts: list[str]) -> list[str]:
    """What ends the first four early; the others go on for longer."""
    return [text[8:11] for text in texts[:4]]


def test_over_http_ended_answers_are_not_computed_on() -> None:
    with house() as here:
        engine = here.opened["oracle"].engine
        engine.runner = InStep(engine.runner, here.loop)
        whole, _, _ = answers(here)
        stats = engine.scheduler.stats
        before = stats.num_computed_tokens
        _, num_prompt, num_output = answers(here, stop=stops_of(whole))
        here.wait_until_free(20)
        num_computed = stats.num_computed_tokens - before
    assert num_output < NUM_ANSWERS * MAX_TOKENS - 4 * 30, "the stops are found early"
    # A prompt that is not cached, and of each answer all tokens but its last.
    num_billed = num_prompt + num_output
    assert num_computed <= num_billed + NUM_LATE * NUM_ANSWERS, (num_computed, num_billed)


def test_in_one_thread_ended_answers_are_not_computed_on_at_all() -> None:
    with LLM(talker()) as llm:
        stats = llm._opened.engine.scheduler.stats
        params = SamplingParams(n=NUM_ANSWERS, max_tokens=MAX_TOKENS, seed=5, ignore_eos=True)
        (whole,) = llm.generate("hello", params)
        stops = tuple(stops_of([one.text for one in whole.answers]))
        before = stats.num_computed_tokens
        (done,) = llm.generate(
            "hello", SamplingParams(n=NUM_ANSWERS, max_tokens=MAX_TOKENS, seed=5, ignore_eos=True, stop=stops)
        )
        num_computed = stats.num_computed_tokens - before
    assert {one.finish_reason for one in done.answers} == {"stop", "length"}
    num_prompt = len(done.prompt_token_ids) - done.num_cached_tokens
    # Each answer computes the prompt's last token for itself, and none the last token it produced.
    assert num_computed == num_prompt - 1 + done.num_output_tokens, (num_computed, num_prompt, done.num_output_tokens)
