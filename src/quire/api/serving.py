"""Run a server: open sockets, load models, print how to use the server, and serve until shutdown.

The server listens before the models are loaded: clients can list the models at once, and a request for a model waits
until it is loaded. The `open_client` function that the caller passes determines where models run.
"""

import asyncio
import socket
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing, nullcontext
from dataclasses import dataclass
from pathlib import Path

from quire import __version__
from quire.api.access.admission import AdmissionSettings
from quire.api.access.auth import Gate
from quire.api.access.conversation_store import ConversationStore
from quire.api.access.keys import KeyRing
from quire.api.access.origins import Origins
from quire.api.admin import PublicAddress, make_admin
from quire.api.app import make_asgi
from quire.api.http.request_span import RequestSpans
from quire.api.listening import listen, listening_unix
from quire.api.models.model_park import MeasureSizes, ModelManager, OnDemandLimits, OpenClient, no_sizes
from quire.api.models.registry import ModelEntry
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
    """The models and settings of a server."""

    models: Sequence[OnDemandModel]
    settings: Settings
    allow_no_keys: bool = False
    on_ready: Callable[[str], None] | None = None
    """Called with the server's URL when all models that stay loaded have been loaded."""
    weigh: MeasureSizes = no_sizes
    """Computes the memory that each model needs."""
    listener: socket.socket | None = None
    """The socket for clients; None: opened at the address in the settings."""


@dataclass(frozen=True, slots=True)
class ServerParts:
    """The parts of a server before sockets are opened and models are loaded."""

    ring: KeyRing
    models: ModelManager
    admission: ServerState
    cache_group: str

    @property
    def gate(self) -> Gate:
        """A gate that identifies callers; it divides the quotas of a key among the current gateways."""
        return Gate(self.ring, lambda: self.models.num_gateways, self.cache_group)


def prepare(plan: Plan, open_client: OpenClient) -> ServerParts:
    """Build the parts of a server, with an open conversation store, if any. Raises ConfigError for invalid settings."""
    server_settings = plan.settings.server
    ring = KeyRing(server_settings.keys_path())
    server_settings.check_access_control(has_keys=ring.is_locked, allow_no_keys=plan.allow_no_keys)
    if ring.problem:
        raise ConfigError(ring.problem)
    entries = [ModelEntry(model.name, model.model, is_required=model.is_kept) for model in plan.models]
    load_limits = OnDemandLimits(plan.settings.serving.queue, server_settings.idle_s, server_settings.turn_s)
    pairs = [*zip(plan.models, entries, strict=True)]
    models = ModelManager(pairs, open_client, plan.weigh, load_limits, _aliases(plan))
    origins = Origins(server_settings.host, server_settings.allowed_hosts, server_settings.allowed_origins)
    lines = server_settings.unstable_lines
    store_path = server_settings.store_path()
    store = None if store_path is None else ConversationStore(store_path, server_settings.store_size_bytes)
    settings = AdmissionSettings(
        server_settings.max_open_requests,
        server_settings.first_byte_s,
        origins,
        are_images_dropped=server_settings.drop_images,
        has_page=not server_settings.no_page,
        are_loops_stopped=server_settings.stop_loops,
        thought_limits=server_settings.thought_limits,
        stable_prefix=StablePrefix(lines) if lines else None,
        store=store,
    )
    admission = ServerState(models, Metrics(server_settings.metrics_prefix), settings)
    return ServerParts(ring, models, admission, server_settings.cache_group or "")


async def run(plan: Plan, print_line: PrintLine, open_client: OpenClient) -> int:
    """Run the server until a shutdown is requested; return the number of requests that had to be ended."""
    server_settings = plan.settings.server
    parts = prepare(plan, open_client)
    admission, store = parts.admission, parts.admission.settings.store
    shutdown = Shutdown(admission, server_settings.drain_s)
    shutdown.handle_signals()
    admission.activity.start()
    spans = open_spans(server_settings.otel, __version__)
    on_ended = None if spans is None else RequestSpans(spans).write
    listener = plan.listener or listen(server_settings.host, server_settings.port)
    admin_path = server_settings.admin_path(listener.getsockname()[1])
    with ExitStack() as stack:
        if spans is not None:
            stack.callback(spans.close)
        stack.enter_context(listener)
        admin_listener = stack.enter_context(listening_unix(admin_path))
        stack.enter_context(closing(store) if store else nullcontext())
        address = PublicAddress(_url_of(listener), parts.ring.is_locked)
        servers = [
            (make_server(make_asgi(admission, parts.gate, on_ended)), listener),
            (make_server(make_admin(admission, shutdown, address, parts.models)), admin_listener),
        ]
        try:
            return await _serve_while_loading(
                servers,
                shutdown,
                parts.models,
                lambda: _print_ready(plan, parts.models, address, admin_path, print_line),
            )
        finally:
            await parts.models.close()


def _url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def _print_ready(
    plan: Plan, models: ModelManager, address: PublicAddress, admin_path: Path, print_line: PrintLine
) -> None:
    """Print the models, the address and an example request, when the models that stay loaded are loaded."""
    url, is_locked = address.url, address.is_locked
    for model in models:
        if model.engine_client is not None:
            print_line(f"{model.name}: {model.engine_client.text.info.line}")
            for note in model.engine_client.text.notes:
                print_line(note)
    name = next(iter(models)).name
    key = " -H 'Authorization: Bearer KEY'" if is_locked else ""
    access = "a key is required" if is_locked else "no keys: every client that reaches this address has access"
    print_line(f"listening on {url}, {access}; admin socket {admin_path}")
    body = f'{{"model": "{name}", "messages": [{{"role": "user", "content": "Hello"}}]}}'
    print_line(f"try: curl {url}/v1/chat/completions{key} -H 'Content-Type: application/json' -d '{body}'")
    if not plan.settings.server.no_page:
        print_line(f"chat in a browser: {url}/")
    if plan.on_ready is not None:
        plan.on_ready(url)


def _aliases(plan: Plan) -> dict[str, str]:
    """Return model names by alias; aliases in a model's settings override those of the server's settings."""
    names = {alias: model.name for model in plan.models for alias in model.aliases}
    return {**names, **{alias: name for alias, name in plan.settings.server.aliases.items() if alias not in names}}


async def _serve_while_loading(
    servers: list[tuple[UvicornServer, socket.socket]],
    shutdown: Shutdown,
    models: ModelManager,
    on_loaded: Callable[[], None],
) -> int:
    """Serve while models load. If a model cannot be loaded, stop the server and raise the error."""
    serving = asyncio.ensure_future(serve_app(servers, shutdown))
    loading = asyncio.ensure_future(models.start())
    try:
        # A shutdown does not wait for models to load.
        await asyncio.wait({loading, serving}, return_when=asyncio.FIRST_COMPLETED)
        if loading.done() and loading.exception() is None:
            freeze_startup_objects()
            on_loaded()
            return await serving
        has_failed = loading.done() and not shutdown.requested.is_set()
        loading.cancel()
        await asyncio.gather(loading, return_exceptions=True)
        await models.close()
        if has_failed:
            loading.result()
        return await serving
    finally:
        shutdown.request()
        await serving
