"""Server-sent events as bytes. A few lines, because nothing more is needed: `data:` and a blank line."""

from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import msgspec

DONE = b"data: [DONE]\n\n"
HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)
Send = Callable[[dict[str, Any]], Awaitable[None]]
_ENCODER = msgspec.json.Encoder()


def event(payload: dict[str, Any]) -> bytes:
    """One event."""
    return b"data: " + _ENCODER.encode(payload) + b"\n\n"


def error_event(body: bytes) -> bytes:
    """An error after the stream began, and the end of it."""
    return b"data: " + body + b"\n\n" + DONE


class SseWriter:
    """A response in parts. The first part opens it."""

    def __init__(self, send: Send, headers: Iterable[tuple[bytes, bytes]] = ()) -> None:
        self._send = send
        self._headers = [*HEADERS, *headers]
        self.is_open = False

    async def write(self, data: bytes, *, is_last: bool = False) -> None:
        """Hand it to the socket; waits while the reader is behind."""
        if not self.is_open:
            self.is_open = True
            await self._send({"type": "http.response.start", "status": 200, "headers": self._headers})
        await self._send({"type": "http.response.body", "body": data, "more_body": not is_last})


async def send_json(send: Send, status: int, body: bytes, headers: Iterable[tuple[bytes, bytes]] = ()) -> None:
    """A whole answer at once."""
    head = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()), *headers]
    await send({"type": "http.response.start", "status": status, "headers": head})
    await send({"type": "http.response.body", "body": body, "more_body": False})
