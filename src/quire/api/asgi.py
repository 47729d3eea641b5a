"""The outermost layer, pure ASGI: names every request, sees its status, and writes its line when it is over.

Foreign web pages are turned away here, before anything is routed, so that no route can forget it.

Middleware of the framework would stand between a route and its client and hide that the client left; this does not. A
reader that takes nothing for STUCK_S is cut here, whatever it was to be sent.
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
"""Hears what a client is about to be told."""
OnEnded = Callable[[RequestRecord], None]
"""Hears of a request that is over, whatever became of it."""


@dataclass(frozen=True, slots=True)
class Pages:
    """What is asked of web pages: strangers are refused where there are no keys."""

    origins: Origins
    ring: KeyRing

    def check(self, headers: Headers) -> None:
        """Refuse what a foreign page could have sent, unless a key stands in its way."""
        if not self.ring.is_locked:
            self.origins.check(headers)

    def cors(self, headers: Headers) -> Sequence[tuple[bytes, bytes]]:
        """What an answer says to a browser, where any pages are allowed."""
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
        self._note = note or _unheard
        self._pages = pages
        self._errors = errors

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """One request."""
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
        told = RecordingSend(scope, send, () if pages is None else pages.cors(headers))
        try:
            await self._answer(scope, receive, told)
        except ReaderStuckError:
            record.is_cut, record.error = True, "reader_too_slow"
            told.abort()
        except ClientGoneError:
            record.is_cut = True
        finally:
            (write_routine if record.is_routine else write_access)(record.line())
            if self._ended is not None:
                self._ended(record)

    async def _answer(self, scope: Any, receive: Any, told: "RecordingSend") -> None:
        """By the routes; or what is to be said instead."""
        try:
            if len(scope["headers"]) > MAX_HEADERS:
                message = f"a request may have {MAX_HEADERS} headers, {len(scope['headers'])} given"
                raise ApiError(431, "too_many_headers", message)
            if self._pages is not None and await self._is_page_served(scope, told, self._pages):
                return
            await self._app(scope, receive, told.send)
        except (ReaderStuckError, ClientGoneError):
            raise
        except asyncio.CancelledError:
            # Only a server that ends breaks a request off from outside; the library would answer in its own words.
            await told.refuse(DrainingError("the server is shutting down and ended this request; ask elsewhere"))
        except Exception as error:
            await told.refuse(error)

    async def _is_page_served(self, scope: Any, told: "RecordingSend", pages: Pages) -> bool:
        """Refuse foreign pages; tell an allowed one what it may send, which is all it asked."""
        method, headers = scope["method"], scope["quire.record"].headers
        pages.check(headers)
        if method != "OPTIONS" or not pages.origins.is_preflight(headers):
            return False
        await told.send(
            {"type": "http.response.start", "status": 204, "headers": pages.origins.preflight(headers)},
            {"type": "http.response.body", "body": b"", "more_body": False},
        )
        return True


class RecordingSend:
    """Notes what is sent, and adds our name for the request to it."""

    def __init__(self, scope: Any, send: Send, always: Sequence[tuple[bytes, bytes]]) -> None:
        self._always = always
        self._record: RequestRecord = scope["quire.record"]
        self._send = send
        self._scope = scope
        self.abort: Callable[[], None] = scope.get("quire.abort", _nothing)
        """Cut the connection at once."""
        self.is_complete = False
        self._is_stuck = False

    async def send(self, *messages: dict[str, Any]) -> None:
        """What is sent together has to be taken together."""
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
        """Say what went wrong, if it can still be said."""
        refusal = api_error_of(error, self._record.request_id)
        self._record.error = refusal.code
        if refusal.status == 500:
            LOG.error("request %s failed", self._record.request_id, exc_info=error)
        if self.is_complete:
            return
        if self._record.status:
            self.abort()
            return
        headers, body = _error_answer(self._scope, refusal)
        await self.send(
            {"type": "http.response.start", "status": refusal.status, "headers": headers},
            {"type": "http.response.body", "body": body, "more_body": False},
        )


async def error_response(request: Request, error: Exception) -> Response:
    """What a route raised, as an answer. What was not raised on purpose goes to the log as well."""
    record: RequestRecord = request.scope["quire.record"]
    refusal = api_error_of(error, record.request_id)
    record.error = refusal.code
    headers, body = _error_answer(request.scope, refusal)
    response = Response(body, refusal.status)
    response.raw_headers = headers
    return response


def _error_answer(scope: Any, refusal: ApiError) -> tuple[list[tuple[bytes, bytes]], bytes]:
    """Headers and body of a refusal, as the API of this path spells it; it is about to be sent."""
    note: Note = scope["quire.note"]
    note(scope["quire.record"], refusal)
    errors: ErrorFormats = scope["quire.errors"]
    return errors.at(scope["path"]).answer(refusal)


def allowed_methods(request: Request) -> str:
    """What the routes at this path take."""
    routes = (route for route in request.app.routes if route.path_regex.match(request.scope["path"]))
    return ", ".join(sorted({method for route in routes for method in route.methods}))


def _unheard(record: RequestRecord, refusal: ApiError) -> None:
    """Nobody remembers what was told."""


def _nothing() -> None:
    """There is no connection to cut where there is no socket."""


def _client_id(headers: Headers) -> str:
    given = headers.get("x-request-id", "")
    return given if HARMLESS.fullmatch(given) else ""


async def _no_other(scope: Any, receive: Any, send: Any) -> None:
    """Lifespans are ours to manage, and there are no websockets here."""
    if scope["type"] == "lifespan":
        while True:
            message = await receive()
            await send({"type": f"{message['type']}.complete"})
            if message["type"] == "lifespan.shutdown":
                return
    elif scope["type"] == "websocket":
        await receive()
        await send({"type": "websocket.close", "code": 1008})
