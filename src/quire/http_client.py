"""The HTTP client of the command line, the gateway and `quire bench`: send one request and stream its response.

    HttpClient ── a new connection, or an idle one ──► server
    HttpResponse ◄── status, headers, body chunks ── SseReader: server-sent events

It is small on purpose, because its callers know their servers. It follows no redirects, so that a key never reaches
another address, and supports no proxies, cookies or compression. `httptools` parses responses, as it does in the API.
"""

import asyncio
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Generator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple, TypeVar
from urllib.parse import urlsplit

import httptools

from quire.errors import ConfigError, MessageError

OK = 200
CONNECT_S = 5.0
READ_BYTES = 1 << 18
MAX_HEAD_BYTES = 1 << 16
"""Limit on bytes outside the body: the response head, trailers and chunk headers."""
MAX_BODY_BYTES = 256 << 10
"""Default limit on the body of a response that is read as a whole."""
POLL_INTERVAL_S = 0.05
"""Interval in seconds at which `iterate` calls `is_stopped`."""
PORTS = {"http": 80, "https": 443}
T = TypeVar("T")
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """The address of a server, and the key and headers sent with every request to it."""

    host: str
    port: int
    has_tls: bool = False
    path: str = ""
    """Prefix of all request paths."""
    key: str | None = field(default=None, repr=False)
    headers: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    socket_path: Path | None = None
    """The server's Unix socket; None: connect to host and port."""

    @classmethod
    def parse(cls, url: str, key: str | None = None, headers: tuple[tuple[str, str], ...] = ()) -> "ServerAddress":
        """Parse a server's URL; a final `/v1` is removed. Raises ConfigError if the URL is invalid."""
        try:
            parts = urlsplit(url)
            port = PORTS[parts.scheme] if parts.port is None else parts.port
        except (ValueError, KeyError):  # an invalid port or IPv6 address, or an unknown scheme
            parts, port = urlsplit(""), 0
        if not parts.hostname or not port or parts.scheme not in PORTS:
            message = f"expected a server address such as http://127.0.0.1:8000, got {url!r}; correct it"
            raise ConfigError(message, ("url",), code="invalid_server_address")
        path = parts.path.rstrip("/").removesuffix("/v1")
        return cls(parts.hostname, port, parts.scheme == "https", path, key, headers)

    @property
    def url(self) -> str:
        """The base URL of all request paths."""
        return f"{'https' if self.has_tls else 'http'}://{self._authority}{self.path}"

    @property
    def _authority(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == PORTS["https" if self.has_tls else "http"] else f"{host}:{self.port}"

    def encode(self, method: str, path: str, body: bytes | None, *, keep_alive: bool) -> bytes:
        """Encode a request as bytes. Raises ConfigError if the key, a header or the path is not printable ASCII."""
        fields = {
            "host": self._authority if self.socket_path is None else "localhost",
            "user-agent": "quire",
            "accept-encoding": "identity",
            "connection": "keep-alive" if keep_alive else "close",
        }
        if self.key:
            fields["authorization"] = f"Bearer {self.key}"
        if body is not None or method == "POST":
            fields |= {"content-type": "application/json", "content-length": str(len(body or b""))}
        fields |= {name.lower(): value for name, value in self.headers}
        lines = [f"{method} {self.path}{path} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items())]
        if not all(line.isascii() and line.isprintable() for line in lines):
            raise ConfigError("expected printable ASCII in key, headers and path, got other characters; correct them")
        return "\r\n".join([*lines, "", ""]).encode() + (body or b"")


class UnansweredError(ConnectionResetError):
    """The connection ended before the first byte of a response."""


class HttpResponse:
    """A streamed response. Reading raises OSError if the connection breaks, MessageError if it is not HTTP."""

    def __init__(self, reader: asyncio.StreamReader, read_s: float | None) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        """Lower-case name -> value."""
        self.has_data = False
        self._reader = reader
        self._read_s = read_s
        self._parser = httptools.HttpResponseParser(self)
        self._body: list[bytes] = []
        self._num_non_body_bytes = 0
        """Bytes received outside the body (head, chunk headers, trailers) since the last body byte."""
        self._has_head = self._is_complete = self._keeps_connection = False

    @property
    def is_reusable(self) -> bool:
        """Whether the connection can carry another request: the response is complete and was read to its end."""
        return self._is_complete and self._keeps_connection and not self._body

    async def wait_for_head(self) -> None:
        """Wait for the status and the headers."""
        while not self._has_head:
            await self._receive()

    async def read(self) -> bytes:
        """Return the next bytes of the body; empty at its end."""
        while not self._body and not self._is_complete:
            await self._receive()
        data = b"".join(self._body)
        self._body.clear()
        return data

    async def read_all(self, max_bytes: int = MAX_BODY_BYTES) -> bytes:
        """Return the rest of the body. Raises MessageError if it is longer than `max_bytes`."""
        pieces, num_bytes = list[bytes](), 0
        while piece := await self.read():
            pieces.append(piece)
            num_bytes += len(piece)
            if num_bytes > max_bytes:
                message = f"expected a response body of at most {max_bytes} bytes, got more"
                raise MessageError(message, code="body_too_long")
        return b"".join(pieces)

    async def events(self, max_bytes: int) -> AsyncIterator["SseEvent"]:
        """Yield the body's server-sent events, each of at most `max_bytes` bytes."""
        reader = SseReader(max_bytes)
        while data := await self.read():
            for event in reader.feed(data):
                yield event

    async def _receive(self) -> None:
        reading = self._reader.read(READ_BYTES)
        data = await (reading if self._read_s is None else _with_timeout(self._read_s, reading, "data"))
        if not data:
            if not self._has_head or self.headers.keys() & {"content-length", "transfer-encoding"}:
                raise ConnectionResetError("the server closed the connection before the end of its response")
            self._is_complete = True
            return
        self.has_data = True
        self._num_non_body_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            raise MessageError(f"expected an HTTP response, got {data[:80]!r}: {error}") from error
        if self._num_non_body_bytes > MAX_HEAD_BYTES:
            what = "trailers and chunk headers" if self._has_head else "a response head"
            message = f"expected {what} of at most {MAX_HEAD_BYTES} bytes, got {self._num_non_body_bytes}"
            raise MessageError(message, code="body_missing" if self._has_head else "head_too_long")

    # -- callbacks of the parser ---------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        """Reject a second response to one request."""
        if self._is_complete:
            raise MessageError("expected one response, got two")

    def on_header(self, name: bytes, value: bytes) -> None:
        """Store a header."""
        self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        """Store the status. After a status below 200 (informational), another response head follows."""
        self.status = int(self._parser.get_status_code())
        self._has_head = self.status >= OK
        self._keeps_connection = self._parser.should_keep_alive()

    def on_body(self, data: bytes) -> None:
        """Store a chunk of the body."""
        self._body.append(data)
        self._num_non_body_bytes = 0

    def on_message_complete(self) -> None:
        """Note the end of the body."""
        self._is_complete = self._has_head


class HttpClient:
    """Sends requests to one server."""

    def __init__(
        self, server: ServerAddress, *, connect_s: float = CONNECT_S, read_s: float | None = None, idle_s: float = 0.0
    ) -> None:
        """`read_s`: longest wait for the next bytes of a response; None: no limit. `idle_s`: how long an idle
        connection is kept for the next request; 0: connections are closed after each response."""
        self.server = server
        self._connect_s = connect_s
        self._read_s = read_s
        self._idle_s = idle_s
        self._idle_connections: list[tuple[float, Streams]] = []
        """Idle connections, each with the time at which it expires."""

    @asynccontextmanager
    async def request(self, method: str, path: str, body: bytes | None = None) -> AsyncIterator[HttpResponse]:
        """Send a request and wait for its status; on exit, the connection is closed, or kept for reuse. Raises OSError
        (TimeoutError included) and MessageError."""
        streams, response = await self._send(self.server.encode(method, path, body, keep_alive=self._idle_s > 0))
        try:
            yield response
        finally:
            if self._idle_s and response.is_reusable:
                self._idle_connections.append((asyncio.get_running_loop().time() + self._idle_s, streams))
            else:
                streams[1].transport.abort()  # immediately: unread data is discarded

    def close(self) -> None:
        """Close all idle connections."""
        for _, (_, writer) in self._idle_connections:
            writer.transport.abort()
        self._idle_connections.clear()

    async def _send(self, data: bytes) -> tuple[Streams, HttpResponse]:
        """Send a request and wait for the head of its response. A server may close an idle connection just as the next
        request is sent. So if a reused connection ends before any response byte, retry once on a new connection."""
        idle = self._take_idle()
        if idle is not None:
            with suppress(UnansweredError):
                return idle, await self._send_on(idle, data)
        streams = await self._connect()
        return streams, await self._send_on(streams, data)

    def _take_idle(self) -> Streams | None:
        now_s = asyncio.get_running_loop().time()
        while self._idle_connections:
            expires_s, (reader, writer) = self._idle_connections.pop()
            if now_s < expires_s and not reader.at_eof() and not writer.is_closing():
                return reader, writer
            writer.transport.abort()
        return None

    async def _connect(self) -> Streams:
        server = self.server
        if server.socket_path is not None:
            opening = asyncio.open_unix_connection(server.socket_path)
        else:
            opening = asyncio.open_connection(server.host, server.port, ssl=_tls() if server.has_tls else None)
        return await _with_timeout(self._connect_s, opening, "connection")

    async def _send_on(self, streams: Streams, data: bytes) -> HttpResponse:
        """Send a request over this connection and return its response once the head has arrived."""
        response = HttpResponse(streams[0], self._read_s)
        try:
            streams[1].write(data)  # no drain: a server may reject a body before it has received all of it
            await response.wait_for_head()
        except BaseException as error:
            streams[1].transport.abort()
            if isinstance(error, ConnectionError) and not response.has_data:
                raise UnansweredError("the server closed the connection before a response") from error
            raise
        return response


async def fetch(
    server: ServerAddress,
    method: str,
    path: str,
    body: bytes | None = None,
    *,
    timeout_s: float = CONNECT_S,
    max_bytes: int = MAX_BODY_BYTES,
) -> tuple[int, bytes]:
    """Send one request; return the status and body of the response. Raises OSError, TimeoutError and MessageError."""

    async def send() -> tuple[int, bytes]:
        async with HttpClient(server).request(method, path, body) as response:
            return response.status, await response.read_all(max_bytes)

    return await _with_timeout(timeout_s, send(), "response")


async def _with_timeout(timeout_s: float | None, work: Awaitable[T], what: str) -> T:
    """Await `work`. On timeout, raises TimeoutError with a message that says what did not arrive."""
    try:
        async with asyncio.timeout(timeout_s):
            return await work
    except TimeoutError as error:
        raise TimeoutError(str(error) or f"no {what} within {timeout_s:g} s") from error


@lru_cache(maxsize=1)
def _tls() -> ssl.SSLContext:
    """Return a TLS context with the system's CA certificates, or those of SSL_CERT_FILE; they are loaded once."""
    return ssl.create_default_context()


class SseEvent(NamedTuple):
    """A server-sent event."""

    name: bytes
    """The `event` field; empty if the event has none."""
    data: bytes


class SseReader:
    """Parses server-sent events from chunks of bytes. Lines end in LF or CRLF. Comments, events without data and an
    incomplete event at the end of the stream are dropped.

    Written by hand for speed, because a load generator must not be the bottleneck: it decodes no text and scans each
    byte once.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        """Limit on one event, ignored lines included."""
        self._rest = bytearray()
        """An incomplete line."""
        self._name = b""
        self._data: list[bytes] = []
        self._num_bytes = 0
        """Bytes of the incomplete event."""

    def feed(self, chunk: bytes) -> list[SseEvent]:
        """Return the events that this chunk completes. Raises MessageError if an event is too long."""
        first, *next_lines = chunk.split(b"\n")
        self._rest += first
        self._count(first)
        if not next_lines:
            return []
        events, line = list[SseEvent](), bytes(self._rest)
        for next_line in next_lines:
            self._parse_line(line.rstrip(b"\r"), events)
            self._count(next_line)
            line = next_line
        self._rest = bytearray(line)
        return events

    def _parse_line(self, line: bytes, events: list[SseEvent]) -> None:
        if line.startswith(b"data:"):
            self._data.append(line[5:].removeprefix(b" "))
        elif line.startswith(b"event:"):
            self._name = line[6:].strip()
        elif not line:
            if self._data:
                events.append(SseEvent(self._name, b"\n".join(self._data)))
            self._name, self._data, self._num_bytes = b"", [], 0

    def _count(self, piece: bytes) -> None:
        self._num_bytes += len(piece)
        if self._num_bytes > self.max_bytes:
            message = f"expected an event of at most {self.max_bytes:,} bytes, got more"
            raise MessageError(message, code="event_too_long")


def iterate(items: AsyncGenerator[T, None], is_stopped: Callable[[], bool] | None = None) -> Generator[T, None, None]:
    """Yield the items of an asynchronous generator to a caller without an event loop, until the generator ends or
    `is_stopped` returns True."""

    async def next_items() -> list[T]:  # empty at the end
        pending = asyncio.ensure_future(anext(items))
        try:
            while is_stopped is None or not is_stopped():
                done, _ = await asyncio.wait({pending}, timeout=None if is_stopped is None else POLL_INTERVAL_S)
                if done:
                    return [pending.result()]
        except StopAsyncIteration:
            pass
        finally:
            if not pending.done():
                pending.cancel()
                await asyncio.wait({pending})
        return []

    with asyncio.Runner() as runner:
        try:
            while next_item := runner.run(next_items()):
                yield next_item[0]
        finally:
            # Close the outermost generator first: the runner would close it and its nested generators concurrently.
            runner.run(items.aclose())
