"""What events of a stream say."""

import json

import pytest

from quire.bench.http_client import StreamChunk, Usage, read_chunk
from quire.errors import MessageError
from tests.support.errors import raises_code


def chunk(**fields: object) -> bytes:
    return json.dumps(fields).encode()


@pytest.mark.parametrize(
    ("data", "event"),
    [
        (chunk(choices=[{"text": "a", "finish_reason": None}]), StreamChunk("a")),
        (chunk(choices=[{"delta": {"content": "b"}}]), StreamChunk("b")),
        (chunk(choices=[{"delta": {"role": "assistant", "content": ""}}]), StreamChunk()),
        (chunk(choices=[{"delta": {"reasoning": "hm"}}]), StreamChunk("hm")),
        (chunk(choices=[{"delta": {}, "finish_reason": "stop"}]), StreamChunk(finish_reason="stop")),
        (chunk(choices=[], usage={"prompt_tokens": 7, "completion_tokens": 3}), StreamChunk(usage=Usage(7, 3, None))),
        (chunk(error={"message": "no memory"}), StreamChunk(error="no memory")),
        (chunk(error="bad"), StreamChunk(error="bad")),
    ],
)
def test_an_event_is_read(data: bytes, event: StreamChunk) -> None:
    assert read_chunk(data) == event


def test_cached_tokens_are_read_where_the_server_says_them() -> None:
    usage = {"prompt_tokens": 7, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 4}}
    assert read_chunk(chunk(choices=[], usage=usage)).usage == Usage(7, 3, 4)


def test_a_tool_call_counts_as_text() -> None:
    assert read_chunk(chunk(choices=[{"delta": {"tool_calls": [{"index": 0}]}}])).piece


@pytest.mark.parametrize("data", [b"{", b"[]", b"7", chunk(choices=[7]), chunk(choices=[], usage={"x": 1})])
def test_what_is_no_event_is_refused_with_what_came(data: bytes) -> None:
    with raises_code(MessageError, "malformed_message"):
        read_chunk(data)
