"""Read request bodies of bounded size and parse them as strict JSON, stricter than Python's parser.

Refused: more than MAX_BODY_BYTES, bodies not received in time, bytes that are not UTF-8, NaN and Infinity, numbers out
of range of a float, integers with too many digits, duplicate keys, unpaired surrogates, nesting that is too deep.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from quire.api.http.errors import ApiError, invalid
from quire.api.http.limits import BODY_S, MAX_BODY_BYTES, MAX_INT_DIGITS, MAX_JSON_DEPTH, ON_LOOP_BYTES
from quire.strict_json import MAX_JSON_LISTS, brackets_of, loads_strictly

Receive = Callable[[], Awaitable[Any]]
Pause = Callable[[], Awaitable[None]]


class ClientGoneError(Exception):
    """The client has disconnected."""


async def read_body(receive: Receive, content_length: str | None, pause: Pause) -> bytes:
    """Return the whole body. `pause` is awaited between the parts of a large body. Raises ApiError."""
    if content_length is not None and (not content_length.isdecimal() or int(content_length[:20]) > MAX_BODY_BYTES):
        raise too_large(content_length[:20])
    try:
        async with asyncio.timeout(BODY_S):
            return await _read(receive, pause)
    except TimeoutError:
        message = f"expected the whole request body within {BODY_S:g} s, got a part of it; send it faster"
        raise ApiError(408, "body_timeout", message) from None


async def _read(receive: Receive, pause: Pause) -> bytes:
    parts, num_bytes = [], 0
    while True:
        if num_bytes > ON_LOOP_BYTES:
            await pause()
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        parts.append(message.get("body", b""))
        num_bytes += len(parts[-1])
        if num_bytes > MAX_BODY_BYTES:
            raise too_large("more")
        if not message.get("more_body", False):
            return b"".join(parts)


def too_large(size: str) -> ApiError:
    """Return the error for a body above MAX_BODY_BYTES."""
    message = f"expected at most {MAX_BODY_BYTES:,} bytes as request body, got {size}; send less at once"
    return ApiError(413, "request_too_large", message, headers=(("connection", "close"),))


def parse_object(body: bytes) -> dict[str, Any]:
    """Parse a body as a JSON object. Raises ApiError."""
    brackets = _brackets(body)
    try:
        value = loads_strictly(body, parse_int=_parse_int)
    except UnicodeDecodeError as error:
        raise invalid(f"expected a UTF-8 request body, got invalid byte {error.start}", code="invalid_json") from None
    except RecursionError:
        raise _too_deep() from None
    except ValueError as error:
        raise invalid(f"expected JSON as request body: {error}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise invalid(f"expected a JSON object as request body, got a {type(value).__name__}", code="invalid_json")
    _check_depth(brackets)
    if b"\\u" in body:
        _check_characters(value)
    return value


def _parse_int(digits: str) -> int:
    if len(digits) > MAX_INT_DIGITS + 1:
        raise ValueError(f"expected at most {MAX_INT_DIGITS} digits in an integer, got {len(digits)}")
    return int(digits)


def _brackets(body: bytes) -> bytes:
    """Return the brackets of lists and objects; empty if they cannot be nested too deeply. Raises ApiError for too many
    of them, before the body is parsed."""
    if body.count(b"[") + body.count(b"{") <= MAX_JSON_DEPTH:
        return b""
    brackets = brackets_of(body)
    if (num_lists := brackets.count(b"[")) > MAX_JSON_LISTS:
        message = (
            f"expected at most {MAX_JSON_LISTS:,} lists and objects in a body, got {num_lists:,}; send less at once"
        )
        raise invalid(message, code="invalid_json")
    return brackets


def _check_depth(brackets: bytes) -> None:
    """Raise ApiError if brackets are left after the innermost level was removed MAX_JSON_DEPTH times."""
    for _ in range(MAX_JSON_DEPTH):
        if not brackets:
            return
        brackets = brackets.replace(b"[]", b"")
    if brackets:
        raise _too_deep()


def _too_deep() -> ApiError:
    return invalid(f"expected JSON nested at most {MAX_JSON_DEPTH} levels deep, got more", code="invalid_json")


def _check_characters(value: Any) -> None:
    """Raise ApiError for an unpaired surrogate, which only an escape can produce. Found by encoding the whole value."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        surrogate = ord(error.object[error.start])
        raise invalid(
            f"expected text of complete characters, got U+{surrogate:04X}, half of a surrogate pair; send both halves",
            code="invalid_text",
        ) from None


async def while_client_stays(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Run `work` and cancel it when the client disconnects; then raise ClientGoneError."""
    task, is_over, is_gone = asyncio.current_task(), False, False

    def cancel_work(_disconnect: "asyncio.Task[None]") -> None:
        nonlocal is_gone
        if not is_over and task is not None:
            is_gone = True
            task.cancel()

    disconnect = asyncio.ensure_future(_wait_disconnect(receive))
    disconnect.add_done_callback(cancel_work)
    try:
        await work
    except asyncio.CancelledError:
        # If the server cancelled the task as well, the cancellation must propagate.
        if is_gone and task is not None and not task.uncancel():
            raise ClientGoneError from None
        raise
    finally:
        is_over = True
        disconnect.cancel()


async def _wait_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
