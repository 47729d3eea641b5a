"""Events out of bytes."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.bench import sse_reader as events
from quire.bench.sse_reader import EventSplitter, SseEvent, UnreadableError, Usage, read_event

STREAM = b": hello\r\n\r\ndata: one\r\n\r\nevent: x\ndata:two\ndata: lines\n\nid: 4\ndata: [DONE]\n\ndata: unfinished"


@given(st.lists(st.integers(0, len(STREAM)), max_size=12))
def test_events_are_the_same_however_the_bytes_are_cut(cuts: list[int]) -> None:
    splitter, found, start = EventSplitter(), [], 0
    for end in (*sorted(cuts), len(STREAM)):
        found += splitter.feed(STREAM[start:end])
        start = end
    assert found == [b"one", b"two\nlines", b"[DONE]"]


def test_an_endless_line_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "MAX_LINE_BYTES", 100)
    with pytest.raises(UnreadableError):
        EventSplitter().feed(b"x" * 101)


def chunk(**fields: object) -> bytes:
    return json.dumps(fields).encode()


@pytest.mark.parametrize(
    ("data", "event"),
    [
        (chunk(choices=[{"text": "a", "finish_reason": None}]), SseEvent("a")),
        (chunk(choices=[{"delta": {"content": "b"}}]), SseEvent("b")),
        (chunk(choices=[{"delta": {"role": "assistant", "content": ""}}]), SseEvent()),
        (chunk(choices=[{"delta": {"reasoning": "hm"}}]), SseEvent("hm")),
        (chunk(choices=[{"delta": {}, "finish_reason": "stop"}]), SseEvent(finish_reason="stop")),
        (chunk(choices=[], usage={"prompt_tokens": 7, "completion_tokens": 3}), SseEvent(usage=Usage(7, 3, None))),
        (chunk(error={"message": "no memory"}), SseEvent(error="no memory")),
        (chunk(error="bad"), SseEvent(error="bad")),
    ],
)
def test_an_event_is_read(data: bytes, event: SseEvent) -> None:
    assert read_event(data) == event


def test_cached_tokens_are_read_where_the_server_says_them() -> None:
    usage = {"prompt_tokens": 7, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 4}}
    assert read_event(chunk(choices=[], usage=usage)).usage == Usage(7, 3, 4)


def test_a_tool_call_counts_as_text() -> None:
    assert read_event(chunk(choices=[{"delta": {"tool_calls": [{"index": 0}]}}])).piece


@pytest.mark.parametrize("data", [b"{", b"[]", b"7", chunk(choices=[7]), chunk(choices=[], usage={"x": 1})])
def test_what_is_no_event_is_refused_with_what_came(data: bytes) -> None:
    with pytest.raises(UnreadableError):
        read_event(data)
