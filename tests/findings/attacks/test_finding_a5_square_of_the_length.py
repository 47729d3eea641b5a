"""Reading costs as much as there is to read, and never the square of it: of what a model, a client or a server writes.

Ratios of processor time within one run: a text four times as long costs four times as much, and a square sixteen times.
"""

import time
from collections.abc import Callable

import pytest

from quire.api.dialects.images import ImagePolicy
from quire.api.dialects.openai.completions import CompletionWriter
from quire.api.dialects.openai.response_items import messages_of_items
from quire.api.dialects.openai.schemas import CompletionFields, ResponseFields
from quire.client.reply.outputs import Piece
from quire.client.reply.reply import Reply
from quire.client.reply.stream import Stream
from quire.client.request.params import SamplingParams
from quire.client.request.requests import make_request
from quire.core.events import Token
from quire.http_client import SseReader
from quire.text.chat.rendering.marked_text import MarkedText
from quire.text.parsers.parts import ToolCallPart
from quire.text.parsers.reader import AnswerFormat, AnswerReader
from quire.text.parsers.tool_format import HERMES, ReasoningFormat
from tests.support.servers.talkers import talker
from tests.support.servers.tool_formats import FORMATS, TAGGED

THOUGHTS = ReasoningFormat("<think>", "</think>")
FOUR_TIMES = 8.0
"""What four times as much may cost; a square costs sixteen times."""


def cost(work: Callable[[int], object], size: int) -> float:
    """Least of two, in processor time."""
    taken = []
    for _ in range(2):
        start_s = time.process_time()
        work(size)
        taken.append(time.process_time() - start_s)
    return min(taken)


def is_no_square(work: Callable[[int], object], size: int) -> bool:
    work(16)
    return cost(work, 4 * size) < FOUR_TIMES * cost(work, size)


def read(fmt: AnswerFormat, *pieces: str) -> AnswerReader:
    reader = AnswerReader(fmt, str)
    for piece in pieces:
        reader.push(piece)
    reader.finish()
    return reader


BLANKS = {
    "between a text and a call": (AnswerFormat(tools=HERMES), "a"),
    "before a thought": (AnswerFormat(reasoning=THOUGHTS), ""),
    "in a thought": (AnswerFormat(reasoning=THOUGHTS), "<think>a"),
    "before a call without a mark": (AnswerFormat(tools=FORMATS["bare"]), ""),
}


@pytest.mark.parametrize("place", BLANKS)
def test_white_space_in_an_answer_costs_its_length(place: str) -> None:
    fmt, before = BLANKS[place]
    assert is_no_square(lambda size: read(fmt, before, *[" " * 64] * (size // 64)), 150_000)


@pytest.mark.parametrize("before", ["<tool_call>\n<function=", "<tool_call>\n<function=f>\n<parameter="])
def test_a_name_without_end_costs_its_length(before: str) -> None:
    assert is_no_square(lambda size: read(AnswerFormat(tools=TAGGED), before, "a" * size), 100_000)


def test_usage_in_every_chunk_costs_the_chunks() -> None:
    text, params = talker().text, SamplingParams(max_tokens=4)
    options = {"include_usage": True, "continuous_usage_stats": True}
    fields = CompletionFields.model_validate({"prompt": [1], "stream": True, "stream_options": options})

    def stream(size: int) -> None:
        reply = Reply(make_request(text, [1, 2, 3], params), params, text.tokenizer)
        writer = CompletionWriter("model", fields)
        for at in range(size):
            pieces = reply.take([Token("r", 0, 4, at + 1, None)])
            writer.pieces([reply], [(0, piece) for piece in pieces])

    assert is_no_square(stream, 3_000)


def test_parts_that_take_turns_and_are_not_read_cost_their_number() -> None:
    def fill(size: int) -> None:
        stream = Stream("r", lambda _: None)
        for at in range(size):
            stream.put([Piece(0, "a", (1,), part=ToolCallPart(at, "id", "f"))])
        assert "".join(piece.delta for piece in stream.take()) == "a" * size

    assert is_no_square(fill, 2_000)


def test_a_line_that_comes_byte_by_byte_costs_its_length() -> None:
    def feed(size: int) -> None:
        reader = SseReader(size)
        for _ in range(size // 4):
            assert reader.feed(b"data") == []

    assert is_no_square(feed, 200_000)


def test_a_history_of_one_answer_in_many_items_costs_its_length() -> None:
    item = {"role": "assistant", "content": "a" * 100}

    def read_items(size: int) -> None:
        fields = ResponseFields.model_construct(input=[item] * size)
        (message,) = messages_of_items(fields, ImagePolicy(False))
        assert len(message["content"]) == 100 * size

    assert is_no_square(read_items, 8_000)


def test_a_text_of_many_spans_is_cut_at_the_cost_of_its_length() -> None:
    def replace(size: int) -> None:
        text = MarkedText("ab " * size).replace("b", "c")
        assert isinstance(text, MarkedText)
        assert str.__str__(text.replace(" ", "")) == "ac" * size

    assert is_no_square(replace, 600)
