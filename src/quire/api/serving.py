"""A server from settings to its end: sockets first, then models, then a few lines that say what to do with it.

The doors open before the models are there, so that whoever lists models while one loads gets an answer. Where a model
runs is decided by whoever calls: an opener is handed in.
"""

import asyncio
import gc
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from quire.api.access.admission import Doors, DoorSettings
from quire.api.access.auth import Gate
from quire.api.access.keys import KeyRing
from quire.api.access.origins import Origins
from quire.api.admin import make_admin
from quire.api.app import make_asgi
from quire.api.models import Behind, Model, Models
from quire.api.server import Closing, Server, listen, listening_unix, make_server, serve
from quire.client.client import Front
from quire.config import Settings
from quire.errors import ConfigError
from quire.observe.metrics import Metrics

Say = Callable[[str], None]
OpenFront = Callable[[str, Settings], AbstractAsyncContextManager[tuple[Front, Behind]]]
"""What is loaded and the settings, to a front and what is behind it, for as long as it is needed."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What to serve."""

    models: Mapping[str, str]
    """What is loaded, by the name clients use."""
    settings: Settings
    is_open_on_purpose: bool = False


async def run(plan: Plan, say: Say, opening: OpenFront) -> int:
    """Serve until asked to end; how many requests had to be ended."""
    doors_settings = plan.settings.doors
    ring = KeyRing(doors_settings.keys_path())
    doors_settings.check_lock(has_keys=ring.is_locked, is_open_on_purpose=plan.is_open_on_purpose)
    if ring.problem:
        raise ConfigError(ring.problem)
    models = Models([Model(name, root) for name, root in plan.models.items()])
    origins = Origins(doors_settings.host, doors_settings.allowed_hosts, doors_settings.allowed_origins)
    limits = DoorSettings(doors_settings.max_inside, plan.settings.serving.queue, origins)
    doors = Doors(models, Metrics(doors_settings.metrics_prefix), limits)
    closing = Closing(doors, doors_settings.drain_s)
    closing.on_signals()
    listener = listen(doors_settings.host, doors_settings.port)
    admin_path = doors_settings.admin_path(listener.getsockname()[1])
    with listener, listening_unix(admin_path) as operator:
        servers = [
            (make_server(make_asgi(doors, Gate(ring))), listener),
            (make_server(make_admin(doors, closing)), operator),
        ]
        return await _serve_while_loading(
            servers, closing, _load(doors, plan, opening), _Lines(listener, admin_path, ring.is_locked, say)
        )


@dataclass(frozen=True, slots=True)
class _Lines:
    """What is said once everything is there."""

    listener: socket.socket
    admin_path: Path
    is_locked: bool
    say: Say

    def ready(self, models: Models) -> None:
        host, port = self.listener.getsockname()[:2]
        url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        for model in models:
            if model.front is not None:
                self.say(f"{model.name}: {model.front.line}")
                for note in model.front.face.notes:
                    self.say(note)
        name = next(iter(models)).name
        key = " -H 'Authorization: Bearer KEY'" if self.is_locked else ""
        lock = "a key is needed" if self.is_locked else "no keys: whoever reaches this address is let in"
        self.say(f"listening on {url}, {lock}; admin socket {self.admin_path}")
        body = f'{{"model": "{name}", "messages": [{{"role": "user", "content": "Hello"}}]}}'
        self.say(f"try: curl {url}/v1/chat/completions{key} -H 'Content-Type: application/json' -d '{body}'")


@asynccontextmanager
async def _load(doors: Doors, plan: Plan, opening: OpenFront) -> AsyncIterator[Models]:
    """All models, one after the other; closed in the end."""
    async with AsyncExitStack() as stack:
        for model in doors.models:
            front, behind = await stack.enter_async_context(opening(model.root, plan.settings))
            model.behind, model.front, model.clear_cache = behind, front, behind.clear_cache
        yield doors.models


def set_aside_what_was_loaded() -> None:
    """Libraries and models stay until the end: looking through them again and again for garbage would stop everybody.

    A collection of everything takes tens of milliseconds, and comes in the middle of somebody's answer.
    """
    gc.collect()
    gc.freeze()


async def _serve_while_loading(
    servers: list[tuple[Server, socket.socket]],
    closing: Closing,
    loading: AbstractAsyncContextManager[Models],
    lines: _Lines,
) -> int:
    """The doors are open from the start; a model that cannot be loaded closes them."""
    serving = asyncio.ensure_future(serve(servers, closing))
    loaded = asyncio.ensure_future(loading.__aenter__())
    try:
        # Whoever ends the server while it loads does not wait for the model.
        await asyncio.wait({loaded, serving}, return_when=asyncio.FIRST_COMPLETED)
        if not loaded.done():
            loaded.cancel()
            await asyncio.gather(loaded, return_exceptions=True)
            return await serving
        set_aside_what_was_loaded()
        lines.ready(loaded.result())
        try:
            return await serving
        finally:
            await loading.__aexit__(None, None, None)
    finally:
        closing.ask()
        await serving
