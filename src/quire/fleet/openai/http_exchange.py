"""One HTTP/1.1 request and its response, on a connection of its own: closing it cancels the request.

Small on purpose: a gateway sends requests to a few servers that its operator has listed, and needs no redirects,
proxies, cookies or compression. `httptools`, which the API's own server reads requests with, reads the responses.
"""

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import lru_cache

import httptools
import msgspec

from quire.errors import MessageError

CONNECT_S = 5.0
READ_BYTES = 1 << 16
MAX_HEAD_BYTES = 1 << 16
MAX_BODY_BYTES = 256 << 10
"""Of a response that is read as a whole: lists of models, metrics, errors."""


@dataclass(frozen=True, slots=True)
class HttpServer:
    """The address of a server, and the key for it."""

    host: str
    port: int
    has_tls: bool = False
    path: str = ""
    key: str | None = field(default=None, repr=False)


class _Answer:
    """What the parser has found so far."""

    def __init__(self) -> None:
        self.parser = httptools.HttpResponseParser(self)
        self.headers: dict[bytes, bytes] = {}
        self.body: list[bytes] = []
        self.has_head = False
        self.is_whole = False

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        self.has_head = True

    def on_body(self, data: bytes) -> None:
        self.body.append(data)

    def on_message_complete(self) -> None:
        self.is_whole = True

    @property
    def ends_with_connection(self) -> bool:
        return b"content-length" not in self.headers and b"transfer-encoding" not in self.headers


class HttpExchange:
    """A response as it comes. Reading raises OSError for a broken connection, MessageError for invalid HTTP."""

    def __init__(self, reader: asyncio.StreamReader) -> None:
        self._reader = reader
        self._answer = _Answer()

    @property
    def status(self) -> int:
        """Of the response, once its head is there."""
        return int(self._answer.parser.get_status_code())

    def header(self, name: str) -> str:
        """A response header; empty if there is none of this name."""
        return self._answer.headers.get(name.lower().encode(), b"").decode("latin-1")

    async def head(self) -> int:
        """Wait for the status."""
        num_bytes = 0
        while not self._answer.has_head:
            num_bytes += await self._more()
            if num_bytes > MAX_HEAD_BYTES and not self._answer.has_head:
                raise MessageError(f"expected a response head of up to {MAX_HEAD_BYTES} bytes, got more")
        return self.status

    async def read(self) -> bytes:
        """The next bytes of the body; none at its end."""
        answer, num_bytes = self._answer, 0
        while not answer.body and not answer.is_whole:
            num_bytes += await self._more()
            if num_bytes > MAX_HEAD_BYTES:
                sentence = f"expected a body, got {num_bytes} bytes of chunk headers or trailers"
                raise MessageError(sentence, code="body_missing")
        data, answer.body = b"".join(answer.body), []
        return data

    async def whole(self) -> bytes:
        """All of the body that is left."""
        pieces, num_bytes = list[bytes](), 0
        while piece := await self.read():
            pieces.append(piece)
            num_bytes += len(piece)
            if num_bytes > MAX_BODY_BYTES:
                rule = f"expected a response body of up to {MAX_BODY_BYTES} bytes, got more"
                raise MessageError(rule, code="body_too_long")
        return b"".join(pieces)

    async def _more(self) -> int:
        data = await self._reader.read(READ_BYTES)
        if not data:
            if not self._answer.has_head or not self._answer.ends_with_connection:
                raise ConnectionResetError("the connection broke during a response")
            self._answer.is_whole = True
            return 0
        try:
            self._answer.parser.feed_data(data)
        except httptools.HttpParserError as error:
            raise MessageError(f"expected an HTTP response, got {data[:80]!r}: {error}") from error
        return len(data)


@asynccontextmanager
async def opened_exchange(
    server: HttpServer, method: str, path: str, body: object = None
) -> AsyncIterator[HttpExchange]:
    """Send a request; the connection is closed on exit. Raises OSError and TimeoutError."""
    async with asyncio.timeout(CONNECT_S):
        tls = _tls() if server.has_tls else None
        reader, writer = await asyncio.open_connection(server.host, server.port, ssl=tls)
    try:
        writer.write(_request(server, method, path, body))
        await writer.drain()
        yield HttpExchange(reader)
    finally:
        writer.transport.abort()  # at once: unread data is not needed


async def fetch(
    server: HttpServer, method: str, path: str, body: object = None, *, timeout_s: float = CONNECT_S
) -> tuple[int, bytes]:
    """A small request and its whole response. Raises OSError, TimeoutError and MessageError."""
    async with asyncio.timeout(timeout_s), opened_exchange(server, method, path, body) as exchange:
        return await exchange.head(), await exchange.whole()


def _request(server: HttpServer, method: str, path: str, body: object) -> bytes:
    host = f"[{server.host}]" if ":" in server.host else server.host
    lines = [
        f"{method} {server.path}{path} HTTP/1.1",
        f"Host: {host}:{server.port}",
        "User-Agent: quire",
        "Accept-Encoding: identity",
        "Connection: close",
    ]
    if server.key is not None:
        lines.append(f"Authorization: Bearer {server.key}")
    data = b""
    if body is not None:
        data = msgspec.json.encode(body)
        lines += ["Content-Type: application/json", f"Content-Length: {len(data)}"]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + data


@lru_cache(maxsize=1)
def _tls() -> ssl.SSLContext:
    """Reads the machine's certificates: once."""
    return ssl.create_default_context()
