"""Servers of this user that run on this machine, found by their admin sockets: a port that answers may be anybody's.

Standard library only: it must work where nothing of the engine is installed.
"""

import json
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from quire.config.server_settings import ServerSettings

TIMEOUT_S = 10.0
ANY_PORT = 0
HTTP_OK = 200


@dataclass(frozen=True, slots=True)
class FoundModel:
    """One that a server has."""

    name: str
    root: str
    """What was loaded: a path or a hub id."""
    is_ready: bool
    state: str
    max_tokens: int | None


@dataclass(frozen=True, slots=True)
class FoundServer:
    """A server, as its operator sees it."""

    socket_path: Path
    url: str
    is_locked: bool
    models: tuple[FoundModel, ...]
    num_prompt_tokens: int
    """Of all requests that have ended."""
    num_cached_tokens: int

    def named(self, model: str | None) -> FoundModel | None:
        """A model by its name or by what was loaded; without a name the first."""
        fitting = [one for one in self.models if model in (None, one.name, one.root)]
        return fitting[0] if fitting else None


def running_servers() -> list[FoundServer]:
    """Those whose sockets stand where quire puts them."""
    folder = ServerSettings().admin_path(ANY_PORT).parent
    found = [server_behind(path) for path in sorted(folder.glob("admin-*.sock"))]
    return [one for one in found if one is not None]


def serving_at(port: int, model: str) -> FoundServer | None:
    """A server of this user's on that port, if this is what it has loaded or loads."""
    found = server_behind(ServerSettings().admin_path(port))
    return found if found is not None and any(one.root == model for one in found.models) else None


@contextmanager
def linked_socket(path: Path, server: FoundServer) -> Iterator[None]:
    """A socket that lies elsewhere is found here too meanwhile. What was left here by one that was killed makes way."""
    link = ServerSettings().admin_path(urlsplit(server.url).port or ANY_PORT)
    with suppress(OSError):  # where nothing can be written the server works all the same
        link.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if server_behind(link) is None:
            link.unlink(missing_ok=True)
            link.symlink_to(path)
    try:
        yield
    finally:
        with suppress(OSError):
            if link.readlink() == path:
                link.unlink()


def server_behind(path: Path) -> FoundServer | None:
    """The server that listens on this socket; None: nobody does any more."""
    try:
        return _found(path, asked(path, "GET", "/stats"))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def asked(path: Path, method: str, route: str, timeout_s: float = TIMEOUT_S) -> dict[str, Any]:
    """What the server behind this socket answers its operator. Raises OSError, or ValueError with what it refused."""
    from http.client import HTTPConnection, HTTPException  # not before: it takes long to import

    connection = HTTPConnection("localhost", timeout=timeout_s)
    try:
        connection.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.sock.settimeout(timeout_s)
        connection.sock.connect(str(path))
        connection.request(method, route)
        response = connection.getresponse()
        told: dict[str, Any] = json.loads(response.read())
    except HTTPException as error:
        raise OSError(f"it does not speak HTTP: {error}") from error
    finally:
        connection.close()
    if response.status != HTTP_OK:
        raise ValueError(told["error"]["message"])
    return told


def _found(path: Path, told: Mapping[str, Any]) -> FoundServer:
    models = tuple(
        FoundModel(one["name"], one["root"], one["is_ready"], one["state"], one["max_model_len"])
        for one in told["models"]
    )
    cached = (told["num_prompt_tokens"], told["num_cached_tokens"])
    return FoundServer(path, told["url"], told["is_locked"], models, *cached)
