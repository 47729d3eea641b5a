"""Running the app: sockets, signals, draining. Knows the server library; the app does not.

SIGTERM, SIGINT   not ready, nobody new; those inside may finish for drain_s; what is left is told so and ended
once more         no more waiting
a third time      the process ends as it would without us
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
from quire.observe.access_log import end_typed_line

CLOSE_GRACE_S = 2.0
"""How long ended streams may take to say so."""


class UvicornServer(uvicorn.Server):
    """The library's, without its hands on our signals, and with an acceptor of ours."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are handled by `Shutdown`."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Connections are taken as there are places for them."""
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
        if number == signal.SIGINT:
            end_typed_line()
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
