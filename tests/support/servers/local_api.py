"""A whole server on a loopback port, in a thread of its own, with oracles behind its doors."""

import asyncio
import json
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from typing import Any, TypeVar

from quire.api.access.admission import AdmissionSettings
from quire.api.access.auth import Gate
from quire.api.access.keys import KeyRing
from quire.api.app import make_asgi
from quire.api.listening import listen
from quire.api.models.registry import ModelEntry, Models
from quire.api.server import Shutdown, make_server, serve_app
from quire.api.server_state import ServerState
from quire.client.engines.async_engine import AsyncEngine
from quire.client.engines.opening import OpenedModel
from quire.core.inspect import invariants
from quire.observe.metrics import Metrics
from tests.support.machine.patience import PATIENCE_S
from tests.support.servers.talkers import PacedRunner, talker

T = TypeVar("T")


@dataclass
class LiveServer:
    """A server that runs, seen from a test's thread."""

    port: int
    admission: ServerState
    shutdown: Shutdown
    loop: asyncio.AbstractEventLoop
    opened: dict[str, OpenedModel]
    thread: threading.Thread | None = None
    results: list[int] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def run(self, work: Callable[[], Awaitable[T]]) -> T:
        """On the server's own loop."""

        async def call() -> T:
            return await work()

        return asyncio.run_coroutine_threadsafe(call(), self.loop).result(timeout=2 * PATIENCE_S)

    def wait_until(self, is_so: Callable[[], bool], within_s: float = PATIENCE_S) -> None:
        """Look at the server's own state, on its loop, until it is so."""

        async def look() -> None:
            async with asyncio.timeout(within_s):
                while not is_so():
                    await asyncio.sleep(0.005)

        self.run(look)

    def wait_until_asked(self, num_requests: int) -> None:
        """So many are inside, and the model of each is known: it is counted among those who wait for that."""
        open_requests = self.admission.open_requests
        self.wait_until(
            lambda: len(open_requests) == num_requests and all(record.model for record, _ in open_requests.values())
        )

    def wait_until_free(self, within_s: float = PATIENCE_S) -> None:
        """No request lives and no block is held."""
        self.wait_until(lambda: not self.admission.open_requests, within_s)
        for opened in self.opened.values():
            engine = opened.engine
            self.wait_until(lambda e=engine: not e.has_work, within_s)  # type: ignore[misc]
            assert engine.memory.stats().num_referenced_blocks == 0

    def wait_for_end(self) -> None:
        """The server has ended by itself."""
        assert self.thread is not None
        self.thread.join(PATIENCE_S)
        assert not self.thread.is_alive()

    def states(self) -> list[str]:
        """Where those inside are."""
        return [record.state for record, _ in self.admission.open_requests.values()]

    def num_tasks(self) -> int:
        """Tasks of the server's loop; to be asked on it."""
        return len(asyncio.all_tasks(self.loop))

    def connection(self, timeout_s: float = PATIENCE_S) -> HTTPConnection:
        return HTTPConnection("127.0.0.1", self.port, timeout=timeout_s)

    def request(self, method: str, path: str, body: Any = None, **headers: str) -> "Reply":
        """One request on a connection of its own. Bytes go as they are, anything else as JSON."""
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        connection = self.connection()
        try:
            names = {name.replace("_", "-"): value for name, value in headers.items()}
            connection.request(method, path, data, {"content-type": "application/json", **names})
            response = connection.getresponse()
            return Reply(response.status, dict(response.getheaders()), response.read())
        finally:
            connection.close()

    def post(self, path: str, body: Any = None, **headers: str) -> "Reply":
        return self.request("POST", path, body, **headers)

    def get(self, path: str, **headers: str) -> "Reply":
        return self.request("GET", path, **headers)


@dataclass(frozen=True)
class Reply:
    """What came back."""

    status: int
    headers: dict[str, str]
    data: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.data)

    @property
    def code(self) -> str:
        return str(self.json["error"]["code"])

    @property
    def events(self) -> list[Any]:
        """The stream's events; its last must be [DONE] and is left out."""
        lines = [line.removeprefix("data: ") for line in self.data.decode().split("\n\n") if line]
        assert lines[-1] == "[DONE]", lines[-3:]
        return [json.loads(line) for line in lines[:-1]]

    @property
    def text(self) -> str:
        """What a stream's chunks say, put together, for the first answer."""
        choices = [choice for event in self.events for choice in event.get("choices", ()) if choice["index"] == 0]
        return "".join(one["delta"].get("content", "") if "delta" in one else one["text"] for one in choices)


@contextmanager
def house(
    *,
    models: dict[str, OpenedModel] | None = None,
    keys_file: Path | None = None,
    settings: AdmissionSettings | None = None,
    drain_s: float = 5.0,
    send_buffer_bytes: int | None = None,
    is_checked: bool = True,
    make: Callable[[ServerState, Gate], Any] = make_asgi,
    cache_group: str = "",
) -> Iterator[LiveServer]:
    """A server for as long as the test runs; afterwards nothing is held."""
    opened = models if models is not None else {"oracle": talker()}
    started: threading.Event = threading.Event()
    made: list[LiveServer] = []
    failed: list[BaseException] = []

    async def live() -> None:
        async with AsyncExitStack() as stack:
            fronts = {name: await stack.enter_async_context(AsyncEngine(one)) for name, one in opened.items()}
            named = Models([ModelEntry(name, engine_client=engine_client) for name, engine_client in fronts.items()])
            admission = ServerState(named, Metrics(), settings)
            shutdown = Shutdown(admission, drain_s)
            listener = listen("127.0.0.1", 0)
            if send_buffer_bytes is not None:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer_bytes)
            here = LiveServer(listener.getsockname()[1], admission, shutdown, asyncio.get_running_loop(), opened)
            made.append(here)
            started.set()
            app = make(admission, Gate(KeyRing(keys_file), cache_group=cache_group))
            here.results.append(await serve_app([(make_server(app), listener)], shutdown))

    def run() -> None:
        try:
            asyncio.run(live())
        except BaseException as error:
            failed.append(error)
            raise
        finally:
            started.set()

    thread = threading.Thread(target=run, name="house")
    thread.start()
    started.wait(PATIENCE_S)
    here = made[0]
    here.thread = thread
    try:
        yield here
    except BaseException:
        # A test that failed gives no more permits: a step that waited for one would keep the whole run from ending.
        for one in opened.values():
            if isinstance(one.engine.runner, PacedRunner):
                one.engine.runner.let_go()
        raise
    finally:
        if thread.is_alive():
            here.loop.call_soon_threadsafe(here.shutdown.request)
        thread.join(PATIENCE_S)
        assert not failed
        assert not thread.is_alive()
    if is_checked:
        for one in opened.values():
            invariants.check_at_rest(one.engine.memory)


def read_some(response: HTTPResponse, num_events: int) -> list[bytes]:
    """The first events of a stream."""
    return [response.readline() + response.readline() for _ in range(num_events)]
