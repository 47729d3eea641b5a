"""Running the app: sockets, signals, draining. Knows the server library; the app does not.

SIGTERM, SIGINT   not ready, nobody new; those inside may finish for drain_s; what is left is told so and ended
once more         no more waiting
a third time      the process ends as it would without us
"""

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import uvicorn

from quire.api.access.admission import Admission
from quire.api.dialects.error_formats import SERVER_ERRORS
from quire.api.http.descriptors import max_connections
from quire.api.http.limits import KEEP_ALIVE_S
from quire.api.http.protocol import Protocol
from quire.errors import ConfigError

CLOSE_GRACE_S = 2.0
"""How long ended streams may take to say so."""
BACKLOG = 2048


class UvicornServer(uvicorn.Server):
    """The library's, without its hands on our signals."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are handled by `Shutdown`."""
        yield


class ServerProtocol(Protocol):
    """Connections of this server."""

    error_format = SERVER_ERRORS.default


def make_server(app: Any) -> UvicornServer:
    """A server for one application; sockets are handed to `serve_app`."""
    ServerProtocol.max_connections = max_connections()
    config = uvicorn.Config(
        app,
        http=ServerProtocol,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=1,
        backlog=BACKLOG,
    )
    return UvicornServer(config)


def listen(host: str, port: int) -> socket.socket:
    """A listening socket, or an error that says what to do."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Connections take it over from here: heads and bodies are written apart, and nobody shall wait 40 ms between.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(f"{host}:{port} cannot be listened on: {error.strerror}; choose another --port") from error
    listener.setblocking(False)
    return listener


def listen_unix(path: Path) -> socket.socket:
    """A socket in the file system that only its owner can reach: 0600 in a folder of 0700."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    mode = path.parent.stat().st_mode & 0o777
    if mode & 0o077:
        raise ConfigError(
            f"the admin socket's folder must be its owner's alone, {path.parent} has mode {mode:04o}; "
            "name another with --admin-socket"
        )
    _clear(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(str(path))
        path.chmod(0o600)
        listener.listen(16)
    except OSError as error:
        listener.close()
        raise ConfigError(f"the admin socket {path} cannot be made: {error.strerror}; name another") from error
    listener.setblocking(False)
    return listener


@contextlib.contextmanager
def listening_unix(path: Path) -> Iterator[socket.socket]:
    """The same for as long as it is needed. In the end the file is removed, unless it is another server's by now."""
    with listen_unix(path) as listener:
        own = path.stat()
        try:
            yield listener
        finally:
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(path.stat(), own):
                    path.unlink()


def _clear(path: Path) -> None:
    """Remove a socket that nobody listens on any more; one that somebody does is theirs."""
    if not path.is_socket():
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as knocking:
        knocking.setblocking(False)
        try:
            knocking.connect(str(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
            return
        except OSError:
            pass  # somebody is there, and busy
    raise ConfigError(f"another server listens on the admin socket {path}; name another with --admin-socket")


class Shutdown:
    """From the first signal to the end."""

    def __init__(self, admission: Admission, drain_s: float) -> None:
        self._admission = admission
        self._drain_s = drain_s
        self.asked = asyncio.Event()
        """Somebody wants the server to end."""
        self._hurry = asyncio.Event()

    def on_signals(self) -> None:
        """Listen to the two signals people use."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.request, number)

    def request(self, number: int | None = None) -> None:
        """End, and the second time at once."""
        if self._hurry.is_set() and number is not None:
            asyncio.get_running_loop().remove_signal_handler(number)
            signal.raise_signal(number)
        elif self.asked.is_set():
            self._hurry.set()
        self._admission.is_draining = True
        self.asked.set()

    async def drain(self) -> int:
        """Wait for those inside, within bounds; how many had to be ended."""
        num_ended = await self._admission.drain(self._drain_s, self._hurry)
        await self._admission.emptied(CLOSE_GRACE_S)
        return num_ended


async def serve_app(servers: list[tuple[UvicornServer, socket.socket]], shutdown: Shutdown) -> int:
    """Serve until asked to end; how many requests had to be ended."""
    running = [asyncio.ensure_future(server.serve([listener])) for server, listener in servers]
    asked = asyncio.ensure_future(shutdown.asked.wait())
    try:
        await asyncio.wait({asked, *running}, return_when=asyncio.FIRST_COMPLETED)
        return await shutdown.drain()
    finally:
        asked.cancel()
        for server, _ in servers:
            server.should_exit = True
        await asyncio.gather(*running)
