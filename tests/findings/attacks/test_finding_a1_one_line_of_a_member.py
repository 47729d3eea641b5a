"""A1: one line of a member that is not quire held the gateway's event loop for minutes: its work was quadratic."""

import asyncio
import json
import logging
from collections.abc import Callable
from time import thread_time
from typing import Any

import msgspec
import pytest

from quire.client.request.params import SamplingParams
from quire.errors import MessageError
from quire.fleet.openai.stream import MAX_LINE_BYTES, OpenAIStream
from tests.support.errors import raises_code
from tests.support.servers.openai_server import openai_server
from tests.unit.fleet.openai.test_link import fleet_of

GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)


def many_choices(_chunk: dict[str, Any]) -> bytes:
    return b'{"choices":[%s]}' % b",".join([b'{"token_ids":[1]}'] * 1_000)


def no_end(_chunk: dict[str, Any]) -> bytes:
    return b"x" * (2 << 20)


@pytest.mark.parametrize(
    ("says", "words"),
    [(many_choices, "expected one choice in a chunk, got 1000"), (no_end, "expected an event of at most")],
)
def test_a_member_with_such_a_line_is_left_and_the_good_one_answers(
    says: Callable[[dict[str, Any]], bytes], words: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> None:
        async with (
            openai_server(says=says) as liar,
            openai_server() as good,
            fleet_of(liar.line, good.line) as model,
        ):
            done = await asyncio.gather(*(model.generate(f"{at} is how it begins", GREEDY) for at in range(4)))
            assert all(len(one.answers[0].token_ids) == 24 for one in done)
            assert liar.bodies

    with caplog.at_level(logging.WARNING):
        asyncio.run(run())
    assert words in caplog.text


def first_line(num_tokens: int, piece_bytes: int) -> Callable[[], None]:
    prompt = (7,) * num_tokens
    line = b"data: " + msgspec.json.encode({"choices": [{"token_ids": [1], "prompt_token_ids": prompt}]}) + b"\n\n"

    def read() -> None:
        stream = OpenAIStream(prompt, 49152, None, 16)
        for at in range(0, len(line), piece_bytes):
            stream.feed(line[at : at + piece_bytes])

    return read


def small_lines(num_bytes: int) -> Callable[[], None]:
    line = b'data: {"choices":[{"token_ids":[1]}]}\n\n'
    lines = line * (num_bytes // len(line))
    return lambda: void(OpenAIStream((1, 2, 3), 49152, None, len(lines)).feed(lines))


def void(_of: object) -> None:
    pass


def seconds_of(work: Callable[[], None]) -> float:
    began_s = thread_time()
    work()
    return thread_time() - began_s


@pytest.mark.parametrize(
    "of_size",
    [lambda size: first_line(size, 100), lambda size: first_line(size, 1 << 16), small_lines],
    ids=["small pieces of a long line", "large pieces of a long line", "many lines"],
)
def test_time_grows_with_the_bytes_and_not_with_their_square(of_size: Callable[[int], Callable[[], None]]) -> None:
    """Eight times as many bytes: a square takes 64 times as long; a factor of two would be lost in noise."""
    small, large = of_size(500_000), of_size(4_000_000)
    rounds = [(seconds_of(small), seconds_of(large)) for _ in range(5)]
    least, least_large = (min(found) for found in zip(*rounds, strict=True))
    assert least_large <= 2.6**3 * least


@pytest.mark.parametrize("choice", [b"{}", b'{"token_ids":[1]}', b'{"text":"x"}'])
def test_choices_beyond_the_first_are_refused_however_many_there_are(choice: bytes) -> None:
    line = b'data: {"choices":[' + b",".join([choice] * 20_000) + b"]}\n\n"
    with raises_code(MessageError, "several_choices"):
        OpenAIStream((1, 2, 3), 49152, None, 1 << 30).feed(line)


def test_a_line_without_an_end_is_refused_before_it_is_long() -> None:
    stream = OpenAIStream((1, 2, 3), 49152, None, 16)
    stream.feed(b"x" * MAX_LINE_BYTES)
    with raises_code(MessageError, "event_too_long"):
        stream.feed(b"x" * 1000)


def test_tokens_beyond_those_that_were_asked_for_are_refused_while_lines_are_read() -> None:
    line = b"data: " + json.dumps({"choices": [{"token_ids": [1, 2]}]}).encode() + b"\n\n"
    with raises_code(MessageError, "too_many_tokens"):
        OpenAIStream((1, 2, 3), 49152, None, 5).feed(line * 100_000)
