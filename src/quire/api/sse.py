"""Server-sent events as bytes, and sending them to a reader that may be slow. A few lines, because nothing more is
needed: `data:` and a blank line.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import msgspec

from quire.api.limits import STUCK_S

DONE = b"data: [DONE]\n\n"
HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)
Send = Callable[[dict[str, Any]], Awaitable[None]]
_ENCODER = msgspec.json.Encoder()


class ReaderStuckError(Exception):
    """The reader took nothing for too long."""


def event(payload: dict[str, Any]) -> bytes:
    """One event."""
    return b"data: " + _ENCODER.encode(payload) + b"\n\n"


def error_event(body: bytes) -> bytes:
    """An error after the stream began, and the end of it."""
    return b"data: " + body + b"\n\n" + DONE


class Writer:
    """A response in parts. The first part opens it; each must be taken within STUCK_S."""

    def __init__(self, send: Send, stuck_s: float | None = None) -> None:
        self._send = send
        self._stuck_s = STUCK_S if stuck_s is None else stuck_s
        self.is_open = False

    async def write(self, data: bytes, *, is_last: bool = False) -> None:
        """Hand it to the socket; waits while the reader is behind."""
        await self._start()
        await self._within({"type": "http.response.body", "body": data, "more_body": not is_last})

    async def _start(self) -> None:
        if not self.is_open:
            self.is_open = True
            await self._within({"type": "http.response.start", "status": 200, "headers": list(HEADERS)})

    async def _within(self, message: dict[str, Any]) -> None:
        try:
            async with asyncio.timeout(self._stuck_s):
                await self._send(message)
        except TimeoutError:
            raise ReaderStuckError from None


async def send_json(send: Send, status: int, body: bytes, headers: Iterable[tuple[bytes, bytes]] = ()) -> None:
    """A whole answer at once."""
    head = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()), *headers]
    await send({"type": "http.response.start", "status": status, "headers": head})
    await send({"type": "http.response.body", "body": body, "more_body": False})
