"""Serves the dashboard on a loopback port, as a proxy to a server's admin socket.

    browser ── token ──► this ── GET, two routes ──► the operator's Unix socket

The admin socket allows much more than reading, and any web page and any user of the machine can reach a loopback port.
So a foreign Host or Origin is rejected, everything but the page's files needs the token, and only the routes that the
page reads are forwarded. Nothing is logged.
"""

import hmac
import re
import secrets
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.client import HTTPException
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, quote, urlsplit

from quire.api.access.origins import Origins
from quire.api.dialects.openai.error_body import OPENAI_ERRORS
from quire.api.http.errors import ApiError
from quire.api.web_page import DASHBOARD, HEADERS, KINDS
from quire.cli.watch.watch_source import ADMIN_PREFIX, WatchSource
from quire.errors import ConfigError

LOOPBACK = "127.0.0.1"
ROUTES = re.compile(r"/watch|/blocks/[0-9]{1,12}")
"""Forwarded routes, after the prefix."""
MAX_CONNECTIONS = 64
PATIENCE_S = 30.0
"""A browser that sends and receives nothing for so long is disconnected."""
PIECE_BYTES = 65_536
MAX_MODEL_CHARS = 512
OPENING = "/open/"
OPENING_BYTES = 18
TOKEN_BYTES = 32


class DashboardServer(ThreadingHTTPServer):
    """Listens once constructed; serves in `serve_forever`."""

    daemon_threads = True
    request_queue_size = MAX_CONNECTIONS

    def __init__(self, source: WatchSource, port: int = 0) -> None:
        """Raises ConfigError if the port is taken."""
        self.source = source
        self.token = secrets.token_urlsafe(TOKEN_BYTES)
        self.origins = Origins(LOOPBACK)
        self.pages = {
            DASHBOARD.path_of(name): (DASHBOARD.read(name), KINDS[name.rpartition(".")[2]]) for name in DASHBOARD.names
        }
        self._opening = secrets.token_urlsafe(OPENING_BYTES)
        self._is_opened = False
        self._lock = threading.Lock()
        self._places = threading.BoundedSemaphore(MAX_CONNECTIONS)
        try:
            super().__init__((LOOPBACK, port), _Handler)
        except OSError as error:
            raise ConfigError(f"cannot listen on port {port}: {error}; choose another with --port") from error
        self.base = f"http://{LOOPBACK}:{self.server_address[1]}"

    @property
    def url(self) -> str:
        """URL of the page, with the token in the fragment, which browsers never send and servers never log."""
        return f"{self.base}{DASHBOARD.path}#key={self.token}"

    @property
    def opening_url(self) -> str:
        """A one-time link for the browser's command line, which other users of the machine can read."""
        return f"{self.base}{OPENING}{self._opening}"

    def opens(self, code: str) -> bool:
        """Whether this is the first use of the link. A second use invalidates the token: one of the two may be another
        user's."""
        with self._lock:
            if not hmac.compare_digest(code.encode("utf-8", "replace"), self._opening.encode()):
                return False
            if self._is_opened:
                self.token = secrets.token_urlsafe(TOKEN_BYTES)  # which no browser has
            self._is_opened, is_first = True, not self._is_opened
            return is_first

    def process_request(self, request: Any, client_address: Any) -> None:
        """Handle the request in its own thread if a connection is free, else close it."""
        if not self._places.acquire(blocking=False):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that disconnects early is no error."""


class _Handler(BaseHTTPRequestHandler):
    """One request."""

    protocol_version = "HTTP/1.1"
    timeout = PATIENCE_S
    server: DashboardServer
    server_version, sys_version = "quire", ""

    def do_GET(self) -> None:
        self.close_connection = True
        try:
            self._answer()
        except ApiError as error:
            self._refuse(error)

    def _answer(self) -> None:
        self.server.origins.check({name.lower(): value for name, value in self.headers.items()})
        parts = urlsplit(self.path)
        if (page := self.server.pages.get(parts.path)) is not None:
            self._send(200, page[1], page[0])
        elif parts.path.startswith(OPENING):
            self._open(parts.path.removeprefix(OPENING))
        else:
            self._check_token()
            self._forward(parts.path, parts.query)

    def _open(self, code: str) -> None:
        if not self.server.opens(code):
            message = (
                "this link opens the dashboard once, and was used before, possibly by another user of this machine: "
                "the page that it opened is closed now; run quire dashboard again"
            )
            raise ApiError(410, "used_up", message)
        self._send(303, KINDS["html"], b"", location=self.server.url)

    def _check_token(self) -> None:
        scheme, _, sent_token = (self.headers.get("authorization") or "").partition(" ")
        token = self.server.token.encode()
        if scheme.lower() != "bearer" or not hmac.compare_digest(sent_token.strip().encode("utf-8", "replace"), token):
            message = "expected the token of this dashboard; it is in the address that quire dashboard printed"
            raise ApiError(401, "invalid_api_key", message)

    def _forward(self, path: str, query: str) -> None:
        """Forward a route that the page reads, with a rebuilt query."""
        route = path.removeprefix(ADMIN_PREFIX)
        if not path.startswith(ADMIN_PREFIX) or ROUTES.fullmatch(route) is None:
            raise ApiError(404, "not_found", "not found: only the routes that the dashboard reads exist here")
        (model, *_) = parse_qs(query).get("model", [""])
        target = f"{route}?model={quote(model[:MAX_MODEL_CHARS], safe='')}" if model else route
        with self._upstream_response(target) as response:
            kind = response.getheader("content-type") or "application/json"
            self._head(response.status, kind)
            token = self.server.token
            while self.server.token == token and (piece := response.read1(PIECE_BYTES)):
                self.wfile.write(piece)

    @contextmanager
    def _upstream_response(self, target: str) -> Iterator[Any]:
        """The server's response; if it is unreachable before responding, raises ApiError."""
        source, has_begun = self.server.source, False
        try:
            with closing(source.connection()) as connection:
                connection.request("GET", source.path(target), headers=dict(source.headers))
                with closing(connection.getresponse()) as response:
                    has_begun = True
                    yield response
        except (OSError, HTTPException) as error:
            if not has_begun:
                raise ApiError(
                    503, "engine_dead", "the server is not reachable; it may come back", retry_after_s=1
                ) from error

    def _refuse(self, error: ApiError) -> None:
        self._send(error.status, "application/json", OPENAI_ERRORS.body(error))

    def _send(self, status: int, kind: str, body: bytes, location: str | None = None) -> None:
        self._head(status, kind, length=len(body), location=location)
        self.wfile.write(body)

    def _head(self, status: int, kind: str, length: int | None = None, location: str | None = None) -> None:
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("connection", "close")
        for name, value in HEADERS.items():
            self.send_header(name, "no-store" if name == "cache-control" else value)
        if length is not None:
            self.send_header("content-length", str(length))
        if location is not None:
            self.send_header("location", location)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        """Log nothing: addresses contain secrets."""
