"""The outermost layer, pure ASGI: names every request, records its status, and writes its access line at its end.

Requests of foreign web pages are rejected here, before routing, so that no route can omit the check.

The framework's middleware would hide from a route that its client disconnected; this does not. A client that reads
nothing for STUCK_S is disconnected here, whatever the response.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from quire.api.access.keys import KeyRing
from quire.api.access.origins import Origins
from quire.api.dialects.error_formats import SERVER_ERRORS, ErrorFormats
from quire.api.dialects.field_names import ignored_headers
from quire.api.http.body import ClientGoneError
from quire.api.http.errors import ApiError, ReaderStuckError, api_error_of
from quire.api.http.headers import Headers, first_headers
from quire.api.http.ids import HARMLESS, new_id
from quire.api.http.limits import MAX_HEADERS, STUCK_S
from quire.api.http.request_record import RequestRecord
from quire.api.http.sse import Send
from quire.errors import DrainingError
from quire.observe.access_log import write_access, write_routine

LOG = logging.getLogger("quire.api")
Note = Callable[[RequestRecord, ApiError], None]
"""Called with a refusal before it is sent."""
OnEnded = Callable[[RequestRecord], None]
"""Called with a request that is over, however it ended."""


@dataclass(frozen=True, slots=True)
class Pages:
    """The rules for web pages: without keys, foreign ones are refused."""

    origins: Origins
    ring: KeyRing

    def check(self, headers: Headers) -> None:
        """Refuse what a foreign page could have sent, unless keys are required."""
        if not self.ring.is_locked:
            self.origins.check(headers)

    def cors(self, headers: Headers) -> Sequence[tuple[bytes, bytes]]:
        """CORS headers of a response, where any pages are allowed."""
        return [*self.origins.cors(headers)] if self.origins.allowed else ()


class RequestMiddleware:
    """Wraps an application."""

    def __init__(
        self,
        app: Any,
        note: Note | None = None,
        pages: Pages | None = None,
        errors: ErrorFormats = SERVER_ERRORS,
        ended: OnEnded | None = None,
    ) -> None:
        self._app = app
        self._ended = ended
        self._note = note or _ignore_refusal
        self._pages = pages
        self._errors = errors

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await _no_other(scope, receive, send)
            return
        headers = first_headers(scope["headers"])
        record = RequestRecord(new_id("req"), scope["method"], scope["path"][:200], headers)
        record.client_id = _client_id(headers)
        scope["quire.record"] = record
        scope["quire.errors"] = self._errors
        scope["quire.note"] = self._note
        pages = self._pages
        sender = RecordingSend(scope, send, () if pages is None else pages.cors(headers))
        try:
            await self._respond(scope, receive, sender)
        except ReaderStuckError:
            record.is_cut, record.error = True, "reader_too_slow"
            sender.abort()
        except ClientGoneError:
            record.is_cut = True
        finally:
            (write_routine if record.is_routine else write_access)(record.line())
            if self._ended is not None:
                self._ended(record)

    async def _respond(self, scope: Any, receive: Any, sender: "RecordingSend") -> None:
        try:
            if len(scope["headers"]) > MAX_HEADERS:
                message = f"expected at most {MAX_HEADERS} headers, got {len(scope['headers'])}"
                raise ApiError(431, "too_many_headers", message)
            if self._pages is not None and await self._is_page_served(scope, sender, self._pages):
                return
            await self._app(scope, receive, sender.send)
        except (ReaderStuckError, ClientGoneError):
            raise
        except asyncio.CancelledError:
            # Only a shutdown cancels a request from outside; the library would send an error of its own.
            await sender.refuse(DrainingError("the server is shutting down and ended this request; use another one"))
        except Exception as error:
            await sender.refuse(error)

    async def _is_page_served(self, scope: Any, sender: "RecordingSend", pages: Pages) -> bool:
        """Refuse foreign pages; respond to the preflight of an allowed one, and return whether it was one."""
        method, headers = scope["method"], scope["quire.record"].headers
        pages.check(headers)
        if method != "OPTIONS" or not pages.origins.is_preflight(headers):
            return False
        await sender.send(
            {"type": "http.response.start", "status": 204, "headers": pages.origins.preflight(headers)},
            {"type": "http.response.body", "body": b"", "more_body": False},
        )
        return True


class RecordingSend:
    """Records the status that is sent, and adds the request's id to the headers."""

    def __init__(self, scope: Any, send: Send, always: Sequence[tuple[bytes, bytes]]) -> None:
        self._always = always
        self._record: RequestRecord = scope["quire.record"]
        self._send = send
        self._scope = scope
        self.abort: Callable[[], None] = scope.get("quire.abort", _noop)
        """Cut the connection at once."""
        self.is_complete = False
        self._is_stuck = False

    async def send(self, *messages: dict[str, Any]) -> None:
        """Send messages; the client must read all of them within STUCK_S."""
        try:
            if not self._is_stuck:
                async with asyncio.timeout(STUCK_S):
                    for message in messages:
                        await self._send(self._named(message))
                        self.is_complete = message["type"] == "http.response.body" and not message.get("more_body")
                return
        except TimeoutError:
            self._is_stuck = True
        raise ReaderStuckError

    def _named(self, message: dict[str, Any]) -> dict[str, Any]:
        if message["type"] == "http.response.start":
            self._record.status = message["status"]
            name = self._record.client_id or self._record.request_id
            own = (*ignored_headers(self._record.ignored), *self._always, (b"x-request-id", name.encode()))
            message["headers"] = [*message.get("headers", ()), *own]
        return message

    async def refuse(self, error: Exception) -> None:
        """Send the error, if no response has begun; else cut the connection."""
        refusal = api_error_of(error, self._record.request_id)
        self._record.error = refusal.code
        if refusal.status == 500:
            LOG.error("request %s failed", self._record.request_id, exc_info=error)
        if self.is_complete:
            return
        if self._record.status:
            self.abort()
            return
        headers, body = _encoded_error(self._scope, refusal)
        await self.send(
            {"type": "http.response.start", "status": refusal.status, "headers": headers},
            {"type": "http.response.body", "body": body, "more_body": False},
        )


async def error_response(request: Request, error: Exception) -> Response:
    """An exception of a route as a response. Unexpected ones are logged as well."""
    record: RequestRecord = request.scope["quire.record"]
    refusal = api_error_of(error, record.request_id)
    record.error = refusal.code
    headers, body = _encoded_error(request.scope, refusal)
    response = Response(body, refusal.status)
    response.raw_headers = headers
    return response


def _encoded_error(scope: Any, refusal: ApiError) -> tuple[list[tuple[bytes, bytes]], bytes]:
    """Headers and body of a refusal in the format of the path's API, after its note was called."""
    note: Note = scope["quire.note"]
    note(scope["quire.record"], refusal)
    errors: ErrorFormats = scope["quire.errors"]
    return errors.at(scope["path"]).answer(refusal)


def allowed_methods(request: Request) -> str:
    """Methods of the routes at this path."""
    routes = (route for route in request.app.routes if route.path_regex.match(request.scope["path"]))
    return ", ".join(sorted({method for route in routes for method in route.methods}))


def _ignore_refusal(record: RequestRecord, refusal: ApiError) -> None:
    """The note of a server without one."""


def _noop() -> None:
    """Without a socket there is no connection to cut."""


def _client_id(headers: Headers) -> str:
    value = headers.get("x-request-id", "")
    return value if HARMLESS.fullmatch(value) else ""


async def _no_other(scope: Any, receive: Any, send: Any) -> None:
    """Acknowledge lifespan messages, and reject websockets."""
    if scope["type"] == "lifespan":
        while True:
            message = await receive()
            await send({"type": f"{message['type']}.complete"})
            if message["type"] == "lifespan.shutdown":
                return
    elif scope["type"] == "websocket":
        await receive()
        await send({"type": "websocket.close", "code": 1008})
