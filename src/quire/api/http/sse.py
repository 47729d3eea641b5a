"""What goes to the socket: server-sent events, and a response that is sent at once. A few lines, for no more is
needed: `data:` and a blank line."""

from collections.abc import Awaitable, Callable, Iterable
from typing import Any

HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)
JSON = b"application/json"
COMMENT = b": keep-alive\n\n"
"""Without content, in any API whose streams are events."""
Send = Callable[[dict[str, Any]], Awaitable[None]]


def event(data: bytes) -> bytes:
    """One event."""
    return b"data: " + data + b"\n\n"


def named_event(name: bytes, data: bytes) -> bytes:
    """One event of a kind that has a name."""
    return b"event: " + name + b"\ndata: " + data + b"\n\n"


async def send_whole(
    send: Send, body: bytes, headers: Iterable[tuple[bytes, bytes]] = (), content_type: bytes = JSON
) -> None:
    """A whole response at once."""
    head = [(b"content-type", content_type), (b"content-length", str(len(body)).encode()), *headers]
    await send({"type": "http.response.start", "status": 200, "headers": head})
    await send({"type": "http.response.body", "body": body, "more_body": False})
