"""Find this user's servers on this machine by their admin sockets, because an open port may belong to another program.
This module must work without the engine's packages.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from quire.config.server_settings import ServerSettings
from quire.errors import MessageError
from quire.observe.served_totals import ServedTotals

TIMEOUT_S = 10.0
ANY_PORT = 0
MAX_BODY_BYTES = 67_108_864


@dataclass(frozen=True, slots=True)
class FoundModel:
    """One model of a server."""

    name: str
    root: str
    """The path or hub id from which the server loads the model."""
    is_ready: bool
    state: str
    max_tokens: int | None
    num_computed_tokens: int = 0
    load_progress: tuple[str, int, int] | None = None
    """Label, and the bytes that are done and all of them, of the current part of loading."""


@dataclass(frozen=True, slots=True)
class FoundServer:
    """State of a server, read from its admin socket; `is_locked`: clients need an API key."""

    socket_path: Path
    url: str
    is_locked: bool
    models: tuple[FoundModel, ...]
    num_prompt_tokens: int
    """Prompt tokens of all finished requests."""
    num_cached_tokens: int
    num_open_requests: int = 0
    served: ServedTotals = field(default_factory=ServedTotals)

    def find_model(self, model: str | None) -> FoundModel | None:
        """Find a model by its name, path or hub id; None selects the first model."""
        matches = [served for served in self.models if model in (None, served.name, served.root)]
        return matches[0] if matches else None


def running_servers() -> list[FoundServer]:
    """List the servers whose admin sockets are in the default folder."""
    folder = ServerSettings().admin_path(ANY_PORT).parent
    servers = [server_on_socket(path) for path in sorted(folder.glob("admin-*.sock"))]
    return [server for server in servers if server is not None]


def server_on_port(port: int, model: str) -> FoundServer | None:
    """Return this user's server on this port if it serves the model, else None."""
    server = server_on_socket(ServerSettings().admin_path(port))
    return server if server is not None and any(served.root == model for served in server.models) else None


@contextmanager
def linked_socket(path: Path, server: FoundServer) -> Iterator[None]:
    """Link an admin socket into the default folder within this context. A link left by an exited server is replaced."""
    link = ServerSettings().admin_path(urlsplit(server.url).port or ANY_PORT)
    with suppress(OSError):  # the server also works without the link
        link.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if server_on_socket(link) is None:
            link.unlink(missing_ok=True)
            link.symlink_to(path)
    try:
        yield
    finally:
        with suppress(OSError):
            if link.readlink() == path:
                link.unlink()


def server_on_socket(path: Path) -> FoundServer | None:
    """Return the server that listens on this socket; None if no server responds."""
    try:
        return _parse_server(path, admin_request(path, "GET", "/stats"))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def admin_request(path: Path, method: str, route: str, timeout_s: float = TIMEOUT_S) -> dict[str, Any]:
    """Send a request to an admin socket. Raises OSError, or ValueError with the server's error message."""
    import asyncio  # imported late, like quire.http_client, because both import slowly

    from quire.http_client import OK, ServerAddress, fetch

    server = ServerAddress("localhost", ANY_PORT, socket_path=path)
    try:
        status, data = asyncio.run(fetch(server, method, route, timeout_s=timeout_s, max_bytes=MAX_BODY_BYTES))
    except MessageError as error:
        raise OSError(str(error)) from error
    body: dict[str, Any] = json.loads(data)
    if status != OK:
        raise ValueError(body["error"]["message"])
    return body


def _parse_server(path: Path, stats: Mapping[str, Any]) -> FoundServer:
    models = tuple(_parse_model(model) for model in stats["models"])
    counts = (stats["num_prompt_tokens"], stats["num_cached_tokens"], stats.get("num_open_requests", 0))
    return FoundServer(path, stats["url"], stats["is_locked"], models, *counts, ServedTotals(**stats.get("served", {})))


def _parse_model(model: Mapping[str, Any]) -> FoundModel:
    """Parse a model of `/stats`; a server of an earlier version leaves out what it does not report."""
    engine, loading = model.get("engine"), model.get("load_progress")
    return FoundModel(
        model["name"],
        model["root"],
        model["is_ready"],
        model["state"],
        model["max_model_len"],
        engine["num_computed_tokens"] if engine else 0,
        (loading["label"], loading["done_bytes"], loading["total_bytes"]) if loading else None,
    )
