"""Encode server-sent events, and send responses that are not streamed. No library is used, because an event is only
`data:` and a blank line."""

from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import msgspec
from starlette.responses import Response

HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)
JSON = b"application/json"
Send = Callable[[dict[str, Any]], Awaitable[None]]


def event(data: bytes) -> bytes:
    """Encode an event."""
    return b"data: " + data + b"\n\n"


def named_event(name: bytes, data: bytes) -> bytes:
    """Encode an event with a name."""
    return b"event: " + name + b"\ndata: " + data + b"\n\n"


def json_response(value: Any) -> Response:
    """Return a JSON response with status 200."""
    return Response(msgspec.json.encode(value), media_type="application/json")


async def send_whole(
    send: Send, body: bytes, headers: Iterable[tuple[bytes, bytes]] = (), content_type: bytes = JSON
) -> None:
    """Send a complete response with status 200."""
    head = [(b"content-type", content_type), (b"content-length", str(len(body)).encode()), *headers]
    await send({"type": "http.response.start", "status": 200, "headers": head})
    await send({"type": "http.response.body", "body": body, "more_body": False})
