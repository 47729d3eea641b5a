"""Run the application with uvicorn: sockets, signals, draining. The application does not depend on uvicorn.

SIGTERM, SIGINT   /ready returns 503, new requests are refused; open ones may run for drain_s and then get an error
second signal     stop waiting for open requests
third signal      the signal's default action
"""

import asyncio
import contextlib
import signal
import socket
from collections.abc import Iterator
from typing import Any

import uvicorn

from quire.api.access.admission import Admission
from quire.api.dialects.error_formats import SERVER_ERRORS
from quire.api.http.acceptor import Acceptor
from quire.api.http.limits import KEEP_ALIVE_S
from quire.api.http.protocol import Protocol
from quire.api.listening import BACKLOG


class UvicornServer(uvicorn.Server):
    """uvicorn's server without its signal handlers, and with quire's `Acceptor`."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Do nothing, because `Shutdown` handles the signals."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start an acceptor, which limits connections, for each socket."""
        await super().startup(sockets=[])
        self.servers = [self._acceptor(listener) for listener in sockets or ()]  # type: ignore[misc]

    def _acceptor(self, listener: socket.socket) -> Acceptor:
        connections = self.server_state.connections
        return Acceptor(
            listener,
            lambda: ServerProtocol(self.config, self.server_state, self.lifespan.state),
            connections.__len__,
            lambda: ServerProtocol.make_room(connections),
        )


class ServerProtocol(Protocol):
    """The protocol of the server's connections, with the error format of the API."""

    error_format = SERVER_ERRORS.default


def make_server(app: Any) -> UvicornServer:
    """Create the server of one application; `serve_app` connects it to its socket."""
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


class Shutdown:
    """The shutdown of a server, from the first signal to the end of draining."""

    def __init__(self, admission: Admission, drain_s: float) -> None:
        self._admission = admission
        self._drain_s = drain_s
        self.requested = asyncio.Event()
        """Set when the shutdown begins."""
        self._stop_waiting = asyncio.Event()

    def handle_signals(self) -> None:
        """Request the shutdown on SIGTERM and SIGINT."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.request, number)

    def request(self, number: int | None = None) -> None:
        """Begin the shutdown. A second call stops waiting; a third by signal triggers the signal's default action."""
        if self._stop_waiting.is_set() and number is not None:
            asyncio.get_running_loop().remove_signal_handler(number)
            signal.raise_signal(number)
        elif self.requested.is_set():
            self._stop_waiting.set()
        self._admission.is_draining = True
        self.requested.set()

    async def drain(self) -> int:
        """Wait for open requests, at most `drain_s`; return the number that had to be ended."""
        return await self._admission.drain(self._drain_s, self._stop_waiting)


async def serve_app(servers: list[tuple[UvicornServer, socket.socket]], shutdown: Shutdown) -> int:
    """Serve until a shutdown is requested; return the number of requests that had to be ended."""
    servings = [asyncio.ensure_future(server.serve([listener])) for server, listener in servers]
    requested = asyncio.ensure_future(shutdown.requested.wait())
    try:
        await asyncio.wait({requested, *servings}, return_when=asyncio.FIRST_COMPLETED)
        return await shutdown.drain()
    finally:
        requested.cancel()
        for server, _ in servers:
            server.should_exit = True
        await asyncio.gather(*servings)
