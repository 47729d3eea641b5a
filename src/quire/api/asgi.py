"""The outermost ASGI middleware: assigns request ids, records the status, and writes the access log.

Requests of foreign web pages are rejected here, before routing, so that no route can omit the check.

Plain ASGI, because Starlette's middleware classes hide disconnects from routes. A client that reads nothing of a
response for STUCK_S is disconnected here, on all routes.
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
from quire.api.http.limits import MAX_HEADERS, STUCK_S
from quire.api.http.request_record import Headers, RequestRecord
from quire.api.http.sse import Send
from quire.errors import DrainingError
from quire.observe.access_log import write_access, write_routine

LOG = logging.getLogger("quire.api")
NoteRefusal = Callable[[RequestRecord, ApiError], None]
"""Called with an error response before it is sent."""
OnEnded = Callable[[RequestRecord], None]
"""Called with every finished request, including failed and aborted ones."""


@dataclass(frozen=True, slots=True)
class PageRules:
    """The rules for web pages: a server without keys refuses requests of foreign pages."""

    origins: Origins
    ring: KeyRing

    def check(self, headers: Headers) -> None:
        """Raise ApiError for a request that a foreign page could have sent, unless keys are required."""
        if not self.ring.is_locked:
            self.origins.check(headers)

    def cors(self, headers: Headers) -> Sequence[tuple[bytes, bytes]]:
        """Return the CORS headers of a response; empty if no foreign origins are allowed."""
        return [*self.origins.cors(headers)] if self.origins.allowed else ()


class RequestMiddleware:
    """Wraps an ASGI application."""

    def __init__(
        self,
        app: Any,
        note_refusal: NoteRefusal | None = None,
        page_rules: PageRules | None = None,
        errors: ErrorFormats = SERVER_ERRORS,
        on_ended: OnEnded | None = None,
    ) -> None:
        self._app = app
        self._on_ended = on_ended
        self._note_refusal = note_refusal or _ignore_refusal
        self._page_rules = page_rules
        self._errors = errors

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await _handle_other_scope(scope, receive, send)
            return
        record = scope["quire.record"] = RequestRecord.of(scope)
        scope["quire.errors"] = self._errors
        scope["quire.note"] = self._note_refusal
        rules = self._page_rules
        sender = ResponseSender(scope, send, () if rules is None else rules.cors(record.headers))
        try:
            await self._respond(scope, receive, sender)
        except ReaderStuckError:
            record.is_cut, record.error = True, "reader_too_slow"
            sender.abort()
        except ClientGoneError:
            record.is_cut = True
        finally:
            (write_routine if record.is_routine else write_access)(record.line())
            if self._on_ended is not None:
                self._on_ended(record)

    async def _respond(self, scope: Any, receive: Any, sender: "ResponseSender") -> None:
        try:
            if len(scope["headers"]) > MAX_HEADERS:
                message = f"expected at most {MAX_HEADERS} headers, got {len(scope['headers'])}"
                raise ApiError(431, "too_many_headers", message)
            if self._page_rules is not None and await self._apply_page_rules(scope, sender, self._page_rules):
                return
            await self._app(scope, receive, sender.send)
        except (ReaderStuckError, ClientGoneError):
            raise
        except asyncio.CancelledError:
            # Only a shutdown cancels a request; uvicorn would send an error in another format.
            await sender.refuse(DrainingError("the server is shutting down and ended this request; use another one"))
        except Exception as error:
            await sender.refuse(error)

    async def _apply_page_rules(self, scope: Any, sender: "ResponseSender", rules: PageRules) -> bool:
        """Refuse foreign pages. Respond to the CORS preflight of an allowed page, and return whether it was one."""
        method, headers = scope["method"], scope["quire.record"].headers
        rules.check(headers)
        if method != "OPTIONS" or not rules.origins.is_preflight(headers):
            return False
        await sender.send(
            {"type": "http.response.start", "status": 204, "headers": rules.origins.preflight(headers)},
            {"type": "http.response.body", "body": b"", "more_body": False},
        )
        return True


class ResponseSender:
    """Sends a response, records its status, and adds the request id and CORS headers."""

    def __init__(self, scope: Any, send: Send, cors_headers: Sequence[tuple[bytes, bytes]]) -> None:
        self._cors_headers = cors_headers
        self._record: RequestRecord = scope["quire.record"]
        self._send = send
        self._scope = scope
        self.abort: Callable[[], None] = scope.get("quire.abort", _noop)
        """Aborts the connection immediately."""
        self.is_complete = False
        self._is_stuck = False

    async def send(self, *messages: dict[str, Any]) -> None:
        """Send messages. Raises ReaderStuckError if the client does not read all of them within STUCK_S."""
        try:
            if not self._is_stuck:
                async with asyncio.timeout(STUCK_S):
                    for message in messages:
                        await self._send(self._with_headers(message))
                        self.is_complete = message["type"] == "http.response.body" and not message.get("more_body")
                return
        except TimeoutError:
            self._is_stuck = True
        raise ReaderStuckError

    def _with_headers(self, message: dict[str, Any]) -> dict[str, Any]:
        if message["type"] == "http.response.start":
            self._record.status = message["status"]
            request_id = self._record.client_id or self._record.request_id
            headers = [*message.get("headers", ()), *ignored_headers(self._record.ignored), *self._cors_headers]
            message["headers"] = [*headers, (b"x-request-id", request_id.encode())]
        return message

    async def refuse(self, error: Exception) -> None:
        """Send an error if no response has begun; abort the connection if one is incomplete."""
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
    """Convert a route's exception to a response. Starlette re-raises unexpected ones, which `refuse` then logs."""
    record: RequestRecord = request.scope["quire.record"]
    refusal = api_error_of(error, record.request_id)
    record.error = refusal.code
    headers, body = _encoded_error(request.scope, refusal)
    response = Response(body, refusal.status)
    response.raw_headers = headers
    return response


def _encoded_error(scope: Any, refusal: ApiError) -> tuple[list[tuple[bytes, bytes]], bytes]:
    """Encode an error in the format of the path's API, after a call of the server's `NoteRefusal`."""
    note_refusal: NoteRefusal = scope["quire.note"]
    note_refusal(scope["quire.record"], refusal)
    errors: ErrorFormats = scope["quire.errors"]
    return errors.of_path(scope["path"]).answer(refusal)


def allowed_methods(request: Request) -> str:
    """Return the methods of all routes that match the request's path."""
    routes = (route for route in request.app.routes if route.path_regex.match(request.scope["path"]))
    return ", ".join(sorted({method for route in routes for method in route.methods}))


def _ignore_refusal(record: RequestRecord, refusal: ApiError) -> None:
    """The `NoteRefusal` of a server that does not record refusals."""


def _noop() -> None:
    """The `abort` of a server protocol that does not provide one."""


async def _handle_other_scope(scope: Any, receive: Any, send: Any) -> None:
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
