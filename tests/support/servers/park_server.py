"""A server whose models come and go, in a thread of its own: with oracles in this process, or in workers."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import aiohttp

from quire.api.listening import listen
from quire.api.models.model_park import Sizes
from quire.api.server import Shutdown
from quire.api.serving import Plan, run
from quire.cli.shared.found_servers import admin_request
from quire.client.engines.async_engine import AsyncEngine
from quire.client.engines.client import EngineClient
from quire.config import OnDemandModel, load_settings
from quire.config.table import BY_NAME
from quire.errors import CheckpointError
from tests.support.machine.patience import PATIENCE_S
from tests.support.servers.talkers import talker

OpenAnyModel = Callable[[], AbstractAsyncContextManager[EngineClient]]
TURN = "turn_s" if "turn_s" in BY_NAME else "min_stay_s"
"""As it was called before tenants took turns."""


def an_oracle() -> AbstractAsyncContextManager[EngineClient]:
    """One in this process."""
    return AsyncEngine(talker())


class ParkServer:
    """A server in a thread of its own, and what a test may do to its models."""

    def __init__(
        self, folder: Path, models: list[OnDemandModel], room: int, open_client: OpenAnyModel, **more: str
    ) -> None:
        with listen("127.0.0.1", 0) as free:
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.socket_path = folder / "run" / f"admin-{self.port}.sock"
        flags = {
            "port": str(self.port),
            "admin_socket": str(self.socket_path),
            "keys_file": str(folder / "keys.json"),
            TURN: "0",
            "drain_s": "5",
            "queue": "2",
            **more,
        }
        self.settings = load_settings(dict(flags), environ={})
        self.models = models
        self.room = room
        self.open_client = open_client
        self.told: list[str] = []
        self.may_load = threading.Event()
        self.may_load.set()
        self.failing: set[str] = set()
        self.lines: list[str] = []
        self.loop: asyncio.AbstractEventLoop | None = None

    @asynccontextmanager
    async def opening(self, model: OnDemandModel, tell: Any) -> AsyncIterator[Any]:
        tell("loading weights", 1, 4)
        while not self.may_load.is_set():
            await asyncio.sleep(0.01)
        if model.name in self.failing:
            raise CheckpointError("it is damaged")
        async with self.open_client() as client:
            self.told.append(f"+{model.name}")
            yield client
        self.told.append(f"-{model.name}")

    async def weigh(self) -> Sizes:
        return Sizes(self.room, {one.name: 1 for one in self.models}, {})

    def live(self) -> None:
        plan = Plan(self.models, self.settings, weigh=self.weigh)
        asyncio.run(run(plan, self.lines.append, self.opening))

    def ask(self, *calls: tuple[str, dict[str, Any]], key: str = "") -> list[tuple[int, str]]:
        async def all_of_them() -> list[tuple[int, str]]:
            names = {"x-api-key": key} if key else {}
            async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(PATIENCE_S), headers=names) as session:

                async def one(route: str, sent: dict[str, Any]) -> tuple[int, str]:
                    async with session.post(self.url + route, json=sent) as response:
                        return response.status, await response.text()

                return await asyncio.gather(*(one(*call) for call in calls))

        return asyncio.run(all_of_them())

    def cards(self) -> dict[str, dict[str, Any]]:
        async def listed() -> dict[str, Any]:
            async with aiohttp.ClientSession() as session, session.get(self.url + "/v1/models") as response:
                found: dict[str, Any] = await response.json()
                return found

        return {one["id"]: one["meta"] for one in asyncio.run(listed())["data"]}


@contextmanager
def park_server(
    tmp_path: Path, *models: OnDemandModel, room: int = 2, open_client: OpenAnyModel = an_oracle, **flags: str
) -> Iterator[ParkServer]:
    here = ParkServer(tmp_path, list(models), room, open_client, **flags)
    original = Shutdown.handle_signals
    setattr(Shutdown, "handle_signals", lambda _self: None)  # noqa: B010 - signals are the main thread's
    thread = threading.Thread(target=here.live, name="park")
    thread.start()
    try:
        while not here.lines and thread.is_alive():
            time.sleep(0.005)
        yield here
    finally:
        here.may_load.set()
        admin_request(here.socket_path, "POST", "/drain")
        thread.join(PATIENCE_S)
        setattr(Shutdown, "handle_signals", original)  # noqa: B010
    assert not thread.is_alive()


def on_demand(*names: str) -> list[OnDemandModel]:
    return [OnDemandModel(name, name) for name in names]
