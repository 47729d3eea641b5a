"""A server that sends one event in lines without end is left, and what came of it is not kept."""

from quire.errors import MessageError
from quire.http_client import SseReader
from tests.support.errors import raises_code

MOST_BYTES = 8 << 20
LINE = b"data: " + b"x" * (1 << 20) + b"\n"


def test_an_event_of_lines_without_end_is_given_up() -> None:
    reader = SseReader(MOST_BYTES)
    for _ in range(MOST_BYTES // len(LINE)):
        assert reader.feed(LINE) == []
    with raises_code(MessageError, "event_too_long"):
        reader.feed(LINE + LINE)


def test_events_one_after_the_other_may_have_more_together() -> None:
    reader = SseReader(MOST_BYTES)
    assert sum(len(reader.feed(piece)) for piece in [b"event: snapshot\n", LINE, b"\n"] * 20) == 20


def test_a_line_without_end_is_given_up() -> None:
    reader = SseReader(MOST_BYTES)
    for _ in range(MOST_BYTES // 4096):
        assert reader.feed(b"x" * 4096) == []
    with raises_code(MessageError, "event_too_long"):
        reader.feed(b"x")
