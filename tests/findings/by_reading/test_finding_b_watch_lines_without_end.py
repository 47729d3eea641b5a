"""A server that sends one event in lines without end is left, and what came of it is not kept."""

from collections.abc import Iterator
from http.client import HTTPException, HTTPResponse

import pytest

from quire.cli.chat.remote import _events
from quire.cli.watch.watch_source import WatchGoneError, events

MOST_BYTES = 8 << 20
LINE = b"data: " + b"x" * (1 << 20) + b"\n"


def test_an_event_of_lines_without_end_is_given_up() -> None:
    num_sent = 0

    def endless() -> Iterator[bytes]:
        nonlocal num_sent
        while num_sent <= 2 * MOST_BYTES:
            num_sent += len(LINE)
            yield LINE

    with pytest.raises(WatchGoneError):
        list(events(endless(), "snapshot"))
    assert num_sent <= MOST_BYTES + 2 * len(LINE)


def test_events_one_after_the_other_may_have_more_together() -> None:
    stream = [b"event: snapshot\n", LINE, b"\n"] * 20
    assert len(list(events(stream, "snapshot"))) == 20


def test_a_line_without_end_is_given_up_by_chat_too() -> None:
    class Endless(HTTPResponse):
        def __init__(self) -> None:
            """No socket."""

        def readline(self, limit: int | None = -1) -> bytes:
            assert limit is not None and 0 < limit <= MOST_BYTES, "all of it is read"  # noqa: PT018
            return b"x" * limit

    with pytest.raises(HTTPException, match="expected a stream line of at most"):
        list(_events(Endless()))
