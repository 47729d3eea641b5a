"""Where `quire top` and `quire dashboard` read from: a server's admin socket, or its URL with an admin key. Reads the
watch stream, one connection at a time, bounded and on demand.
"""

import json
import socket
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from pathlib import Path
from types import MappingProxyType
from typing import Any
from urllib.parse import quote, urlsplit

from quire.cli.chat.remote import MAX_LINE_BYTES, bounded_lines, server_base
from quire.cli.shared.columns import plain
from quire.cli.shared.found_servers import HTTP_OK, FoundServer, running_servers
from quire.errors import ConfigError, RequestError

SILENCE_S = 20.0
"""A stream that is silent for so long is dead: the server sends twice a second."""
MAX_REFUSAL_BYTES = 65_536
MAX_REASON_CHARS = 300
ADMIN_PREFIX = "/v1/admin"
REFUSALS = frozenset({400, 401, 403, 404, 405})
"""Permanent errors; others may be temporary: the server is starting, draining or full."""


class WatchGoneError(OSError):
    """The stream broke or is unavailable; a retry may succeed."""


@dataclass(frozen=True, slots=True)
class WatchSource:
    """One server, and how to reach its admin routes."""

    url: str
    """The public URL."""
    socket_path: Path | None = None
    """The admin socket; None: use the URL and a key."""
    key: str | None = None

    def connection(self) -> HTTPConnection:
        """An open connection. Raises OSError."""
        parts = urlsplit(self.url)
        kind = HTTPSConnection if parts.scheme == "https" and self.socket_path is None else HTTPConnection
        host = "localhost" if self.socket_path is not None else parts.hostname or ""
        made = kind(host, None if self.socket_path is not None else parts.port, timeout=SILENCE_S)
        if self.socket_path is None:
            made.connect()
            return made
        made.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            made.sock.settimeout(SILENCE_S)
            made.sock.connect(str(self.socket_path))
        except OSError:
            made.close()
            raise
        return made

    def path(self, route: str) -> str:
        """The path of a route: the admin socket has no prefix."""
        return route if self.socket_path is not None else ADMIN_PREFIX + route

    @property
    def headers(self) -> Mapping[str, str]:
        """Headers of every request."""
        return MappingProxyType({"authorization": f"Bearer {self.key}"} if self.key else {})

    def snapshots(self, model: str | None = None) -> Generator[bytes, None, None]:
        """Snapshots as JSON. Raises RequestError if the server rejects the request, else WatchGoneError at the end."""
        route = "/watch" if model is None else f"/watch?model={quote(model, safe='')}"
        try:
            connection = self.connection()
        except OSError as error:
            raise WatchGoneError(f"no server reachable at {self.url}: {error}") from error
        with closing(connection):
            try:
                connection.request("GET", self.path(route), headers=dict(self.headers))
                with closing(connection.getresponse()) as response:
                    if response.status != HTTP_OK:
                        raise _refusal(response)
                    yield from events(bounded_lines(response), "snapshot")
            except (OSError, HTTPException) as error:
                raise WatchGoneError(str(error) or type(error).__name__) from error
        raise WatchGoneError("the server closed the stream")


def events(lines: Iterable[bytes], kind: str) -> Iterator[bytes]:
    """The data of a stream's events of this kind. Truncated events are dropped; comments are keep-alives."""
    name, data, num_bytes = "", list[bytes](), 0
    for raw in lines:
        line = raw.rstrip(b"\r\n")
        num_bytes += len(line)
        if num_bytes > MAX_LINE_BYTES:
            raise WatchGoneError(f"expected an event of at most {MAX_LINE_BYTES:,} bytes, got more; is it quire?")
        if not line:
            if name == kind and data:
                yield b"\n".join(data)
            name, data, num_bytes = "", [], 0
        elif line.startswith(b"event:"):
            name = line[6:].strip().decode("latin-1")
        elif line.startswith(b"data:"):
            data.append(line[5:].removeprefix(b" "))


def _refusal(response: HTTPResponse) -> Exception:
    reason = _refusal_reason(response)
    if response.status in (401, 403):
        return RequestError(f"{reason}; pass an admin key with --key, or run this on the server's own machine")
    if response.status == 404:
        return RequestError(f"{reason}; an older server cannot be watched: update it, or choose another model")
    return RequestError(reason) if response.status in REFUSALS else WatchGoneError(reason)


def _refusal_reason(response: HTTPResponse) -> str:
    """The server's error message, escaped."""
    try:
        found: Any = json.loads(response.read(MAX_REFUSAL_BYTES))
        return plain(str(found["error"]["message"]))[:MAX_REASON_CHARS]
    except (ValueError, KeyError, TypeError):
        return f"the server responded with {response.status}"


# -- choosing one ------------------------------------------------------------------------------------------------------


def chosen_source(server: str | None, key: str | None) -> WatchSource:
    """The selected server. This user's own servers on this machine need no key. Raises ConfigError."""
    if server is None:
        return _only_one(running_servers())
    url = server_base(server)
    own = None if key else next((one for one in running_servers() if one.url == url), None)
    return WatchSource(url, key=key) if own is None else WatchSource(url, own.socket_path)


def _only_one(found: list[FoundServer]) -> WatchSource:
    if not found:
        raise ConfigError(
            "no server of yours is running on this machine; start one with: quire serve MODEL, or name another one "
            "with --server URL --key KEY"
        )
    if len(found) > 1:
        urls = ", ".join(one.url for one in found)
        raise ConfigError(f"expected one running server, got {len(found)} ({urls}); choose one with --server")
    return WatchSource(found[0].url, found[0].socket_path)
