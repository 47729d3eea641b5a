"""Running the app: sockets, signals, draining. Depends on the server library; the app does not.

SIGTERM, SIGINT   not ready, no new requests; open ones may finish for drain_s; the rest get an error and end
once more         no more waiting
a third time      the signal's default action
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

CLOSE_GRACE_S = 2.0
"""How long ended streams may take to send their error."""


class UvicornServer(uvicorn.Server):
    """The library's server without its signal handlers, and with quire's acceptor."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are handled by `Shutdown`."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept connections as there are places for them."""
        await super().startup(sockets=[])
        self.servers = [self._acceptor(one) for one in sockets or ()]  # type: ignore[misc]

    def _acceptor(self, listener: socket.socket) -> Acceptor:
        connections = self.server_state.connections
        return Acceptor(
            listener,
            lambda: ServerProtocol(self.config, self.server_state, self.lifespan.state),
            connections.__len__,
            lambda: ServerProtocol.make_room(connections),
        )


class ServerProtocol(Protocol):
    """Connections of this server."""

    error_format = SERVER_ERRORS.default


def make_server(app: Any) -> UvicornServer:
    """A server for one application; sockets are handed to `serve_app`."""
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
    """From the first signal to the end."""

    def __init__(self, admission: Admission, drain_s: float) -> None:
        self._admission = admission
        self._drain_s = drain_s
        self.requested = asyncio.Event()
        """Set once the shutdown has begun."""
        self._hurry = asyncio.Event()

    def on_signals(self) -> None:
        """Handle SIGTERM and SIGINT."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.request, number)

    def request(self, number: int | None = None) -> None:
        """Begin the shutdown; a second call ends it at once."""
        if self._hurry.is_set() and number is not None:
            asyncio.get_running_loop().remove_signal_handler(number)
            signal.raise_signal(number)
        elif self.requested.is_set():
            self._hurry.set()
        self._admission.is_draining = True
        self.requested.set()

    async def drain(self) -> int:
        """Wait for open requests, within bounds; how many had to be ended."""
        num_ended = await self._admission.drain(self._drain_s, self._hurry)
        await self._admission.emptied(CLOSE_GRACE_S)
        return num_ended


async def serve_app(servers: list[tuple[UvicornServer, socket.socket]], shutdown: Shutdown) -> int:
    """Serve until a shutdown is requested; how many requests had to be ended."""
    running = [asyncio.ensure_future(server.serve([listener])) for server, listener in servers]
    requested = asyncio.ensure_future(shutdown.requested.wait())
    try:
        await asyncio.wait({requested, *running}, return_when=asyncio.FIRST_COMPLETED)
        return await shutdown.drain()
    finally:
        requested.cancel()
        for server, _ in servers:
            server.should_exit = True
        await asyncio.gather(*running)
