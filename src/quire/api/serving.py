"""A server from settings to its end: sockets first, then models, then a few lines on how to use it.

The server listens before the models are loaded: a client that lists them meanwhile gets a response, and a request for
one waits for it. The caller decides where a model runs: it passes an opener.
"""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager, closing, nullcontext
from dataclasses import dataclass
from pathlib import Path

from quire import __version__
from quire.api.access.admission import AdmissionSettings
from quire.api.access.auth import Gate
from quire.api.access.conversation_store import opened_store
from quire.api.access.keys import KeyRing
from quire.api.access.origins import Origins
from quire.api.admin import PublicAddress, make_admin
from quire.api.app import make_asgi
from quire.api.http.request_span import RequestSpans
from quire.api.listening import listen, listening_unix
from quire.api.models.model_park import ModelManager, OpenClient, ParkLimits, Weigh, weightless
from quire.api.models.registry import ModelEntry, Models
from quire.api.server import Shutdown, UvicornServer, make_server, serve_app
from quire.api.server_state import ServerState
from quire.client.request.conversation import StablePrefix
from quire.config import OnDemandModel, Settings
from quire.errors import ConfigError
from quire.lasting_objects import freeze_startup_objects
from quire.observe.metrics import Metrics
from quire.observe.spans import open_spans

PrintLine = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Plan:
    """What to serve."""

    models: Sequence[OnDemandModel]
    settings: Settings
    allow_no_keys: bool = False
    on_ready: Callable[[str], None] | None = None
    """Called with the address once all kept models are loaded."""
    weigh: Weigh = weightless
    """Returns the memory that each model takes."""
    listener: socket.socket | None = None
    """The socket for clients; None: it is opened by the settings."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """All that serves requests, before a socket is open and any model is loaded."""

    ring: KeyRing
    models: Models
    park: ModelManager
    limits: AdmissionSettings
    admission: ServerState
    cache_group: str

    @property
    def gate(self) -> Gate:
        """Admits callers; the quotas of a key are divided among the gateways there are."""
        return Gate(self.ring, lambda: self.models.num_gateways, self.cache_group)


def prepare(plan: Plan, opening: OpenClient) -> Prepared:
    """Raises ConfigError for what an operator must not start. Its store, if it has one, is open."""
    server_settings = plan.settings.server
    ring = KeyRing(server_settings.keys_path())
    server_settings.check_lock(has_keys=ring.is_locked, allow_no_keys=plan.allow_no_keys)
    if ring.problem:
        raise ConfigError(ring.problem)
    entries = [ModelEntry(one.name, one.model, is_required=one.is_kept) for one in plan.models]
    models = Models(entries, _aliases(plan))
    park_limits = ParkLimits(plan.settings.serving.queue, server_settings.idle_s, server_settings.turn_s)
    park = models.park = ModelManager(zip(plan.models, entries, strict=True), opening, plan.weigh, park_limits)
    origins = Origins(server_settings.host, server_settings.allowed_hosts, server_settings.allowed_origins)
    stable_prefix = StablePrefix(server_settings.unstable_lines)
    store = opened_store(server_settings.store_path(), server_settings.store_size_bytes)
    limits = AdmissionSettings(
        server_settings.max_open_requests,
        origins,
        server_settings.drop_images,
        not server_settings.no_page,
        stable_prefix,
        store,
    )
    admission = ServerState(models, Metrics(server_settings.metrics_prefix), limits)
    return Prepared(ring, models, park, limits, admission, server_settings.cache_group or "")


async def run(plan: Plan, print_line: PrintLine, opening: OpenClient) -> int:
    """Serve until a shutdown is requested; how many requests had to be ended."""
    server_settings = plan.settings.server
    prepared = prepare(plan, opening)
    admission, store = prepared.admission, prepared.limits.store
    shutdown = Shutdown(admission, server_settings.drain_s)
    shutdown.on_signals()
    spans = open_spans(server_settings.otel, __version__)
    ended = None if spans is None else RequestSpans(spans).ended
    listener = plan.listener or listen(server_settings.host, server_settings.port)
    admin_path = server_settings.admin_path(listener.getsockname()[1])
    with ExitStack() as held:
        if spans is not None:
            held.callback(spans.close)
        held.enter_context(listener)
        operator = held.enter_context(listening_unix(admin_path))
        held.enter_context(closing(store) if store else nullcontext())
        address = PublicAddress(_url_of(listener), prepared.ring.is_locked)
        servers = [
            (make_server(make_asgi(admission, prepared.gate, ended)), listener),
            (make_server(make_admin(admission, shutdown, address, prepared.park)), operator),
        ]
        return await _serve_while_loading(
            servers,
            shutdown,
            _loaded(prepared.park, prepared.models),
            _Lines(address, admin_path, prepared.limits.has_page, print_line, plan.on_ready),
        )


def _url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


@dataclass(frozen=True, slots=True)
class _Lines:
    """The lines printed once all kept models are loaded."""

    address: PublicAddress
    admin_path: Path
    has_page: bool
    print_line: PrintLine
    on_ready: Callable[[str], None] | None

    def ready(self, models: Models) -> None:
        url, is_locked = self.address.url, self.address.is_locked
        for model in models:
            if model.engine_client is not None:
                self.print_line(f"{model.name}: {model.engine_client.text.info.line}")
                for note in model.engine_client.text.notes:
                    self.print_line(note)
        name = next(iter(models)).name
        key = " -H 'Authorization: Bearer KEY'" if is_locked else ""
        lock = "a key is required" if is_locked else "no keys: every client that reaches this address has access"
        self.print_line(f"listening on {url}, {lock}; admin socket {self.admin_path}")
        body = f'{{"model": "{name}", "messages": [{{"role": "user", "content": "Hello"}}]}}'
        self.print_line(f"try: curl {url}/v1/chat/completions{key} -H 'Content-Type: application/json' -d '{body}'")
        if self.has_page:
            self.print_line(f"chat in a browser: {url}/")
        if self.on_ready is not None:
            self.on_ready(url)


def _aliases(plan: Plan) -> dict[str, str]:
    """Those of the models themselves come before the operator's pairs."""
    own = {alias: one.name for one in plan.models for alias in one.aliases}
    return {**own, **{alias: name for alias, name in plan.settings.server.aliases.items() if alias not in own}}


@asynccontextmanager
async def _loaded(park: ModelManager, models: Models) -> AsyncIterator[Models]:
    """All models that are kept are there; all that are there are closed in the end."""
    try:
        await park.start()
        yield models
    finally:
        await park.close()


async def _serve_while_loading(
    servers: list[tuple[UvicornServer, socket.socket]],
    shutdown: Shutdown,
    loading: AbstractAsyncContextManager[Models],
    lines: _Lines,
) -> int:
    """The server listens from the start; a model that cannot be loaded ends it."""
    serving = asyncio.ensure_future(serve_app(servers, shutdown))
    loaded = asyncio.ensure_future(loading.__aenter__())
    try:
        # A shutdown while a model loads does not wait for it.
        await asyncio.wait({loaded, serving}, return_when=asyncio.FIRST_COMPLETED)
        is_ending = shutdown.requested.is_set()
        if not loaded.done() or (is_ending and loaded.exception() is not None):
            loaded.cancel()
            await asyncio.gather(loaded, return_exceptions=True)
            return await serving
        freeze_startup_objects()
        lines.ready(loaded.result())
        try:
            return await serving
        finally:
            await loading.__aexit__(None, None, None)
    finally:
        shutdown.request()
        await serving
