"""Where `quire top` and `quire dashboard` see a server from: its operator's Unix socket, or its address with an admin
key. Reads its watch stream, one connection at a time; what comes is bounded, and read only when it is asked for.
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
"""A stream that says nothing for so long is dead: it has something to say twice a second."""
MAX_REFUSAL_BYTES = 65_536
MAX_REASON_CHARS = 300
ADMIN_PREFIX = "/v1/admin"
REFUSALS = frozenset({400, 401, 403, 404, 405})
"""Asking again would not help; anything else may pass: a server that starts, drains or is full."""


class WatchGoneError(OSError):
    """The stream broke, or is not to be had now; it may be again."""


@dataclass(frozen=True, slots=True)
class WatchSource:
    """One server, as an operator reaches it."""

    url: str
    """Where everybody else reaches it."""
    socket_path: Path | None = None
    """The operator's own way in; None: with a key, like everybody else."""
    key: str | None = None

    def connection(self) -> HTTPConnection:
        """One that is open. Raises OSError."""
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
        """What is asked for: on the socket routes stand at the top."""
        return route if self.socket_path is not None else ADMIN_PREFIX + route

    @property
    def headers(self) -> Mapping[str, str]:
        """Sent with every question."""
        return MappingProxyType({"authorization": f"Bearer {self.key}"} if self.key else {})

    def snapshots(self, model: str | None = None) -> Generator[bytes, None, None]:
        """Each as JSON, until the caller has enough. Raises RequestError if it is refused, else WatchGoneError."""
        route = "/watch" if model is None else f"/watch?model={quote(model, safe='')}"
        try:
            connection = self.connection()
        except OSError as error:
            raise WatchGoneError(f"nobody answers at {self.url}: {error}") from error
        with closing(connection):
            try:
                connection.request("GET", self.path(route), headers=dict(self.headers))
                with closing(connection.getresponse()) as response:
                    if response.status != HTTP_OK:
                        raise _refusal(response)
                    yield from events(bounded_lines(response), "snapshot")
            except (OSError, HTTPException) as error:
                raise WatchGoneError(str(error) or type(error).__name__) from error
        raise WatchGoneError("the server ended the stream")


def events(lines: Iterable[bytes], kind: str) -> Iterator[bytes]:
    """The data of a stream's events of this kind. One that is cut is dropped; comments keep the line alive."""
    name, data, num_bytes = "", list[bytes](), 0
    for raw in lines:
        line = raw.rstrip(b"\r\n")
        num_bytes += len(line)
        if num_bytes > MAX_LINE_BYTES:
            raise WatchGoneError(f"expected an event of at most {MAX_LINE_BYTES:,} bytes, got more; is this a quire?")
        if not line:
            if name == kind and data:
                yield b"\n".join(data)
            name, data, num_bytes = "", [], 0
        elif line.startswith(b"event:"):
            name = line[6:].strip().decode("latin-1")
        elif line.startswith(b"data:"):
            data.append(line[5:].removeprefix(b" "))


def _refusal(response: HTTPResponse) -> Exception:
    told = _told(response)
    if response.status in (401, 403):
        return RequestError(f"{told}; give an admin key with --key, or look from the server's own machine")
    if response.status == 404:
        return RequestError(f"{told}; a server of before cannot be watched: update it, or name another model")
    return RequestError(told) if response.status in REFUSALS else WatchGoneError(told)


def _told(response: HTTPResponse) -> str:
    """Why, in the server's own words, which are not trusted to be harmless."""
    try:
        found: Any = json.loads(response.read(MAX_REFUSAL_BYTES))
        return plain(str(found["error"]["message"]))[:MAX_REASON_CHARS]
    except (ValueError, KeyError, TypeError):
        return f"the server answered {response.status}"


# -- choosing one ------------------------------------------------------------------------------------------------------


def chosen_source(server: str | None, key: str | None) -> WatchSource:
    """The server that is meant. Of this user's own, on this machine, no key is needed. Raises ConfigError."""
    if server is None:
        return _only_one(running_servers())
    url = server_base(server)
    own = None if key else next((one for one in running_servers() if one.url == url), None)
    return WatchSource(url, key=key) if own is None else WatchSource(url, own.socket_path)


def _only_one(found: list[FoundServer]) -> WatchSource:
    if not found:
        raise ConfigError(
            "no server of yours runs on this machine; start one with: quire serve MODEL, or name one elsewhere with "
            "--server URL --key KEY"
        )
    if len(found) > 1:
        urls = ", ".join(one.url for one in found)
        raise ConfigError(f"one server is watched at a time, {len(found)} of yours run ({urls}); choose with --server")
    return WatchSource(found[0].url, found[0].socket_path)
