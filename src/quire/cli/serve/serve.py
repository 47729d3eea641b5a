"""`quire serve`: serve models with an OpenAI-compatible API. Messages go to stderr; Ctrl-C lets requests finish."""

import signal
import sys
import termios
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Annotated

import typer

from quire.cli.shared.flags import with_all_settings
from quire.cli.shared.server_run import prepare_server, print_line, run_until_shutdown
from quire.config import Group, Settings
from quire.config.home import expand_home
from quire.errors import ConfigError
from quire.terminal import without_mode

if TYPE_CHECKING:
    from socket import socket

    from quire.config import OnDemandModel
    from quire.fleet.gateway.client import FleetModel
    from quire.worker.parent.spawned_worker import SpawnedWorker

EPILOG = """\
\b
Examples:
  quire serve model.gguf
  quire serve ./llama ./qwen --port 8080
  quire serve --models-folder ~/models --memory 16GiB
  quire keys add alice && quire serve org/name --host 0.0.0.0
"""


@with_all_settings
def serve(
    settings: Settings,
    models: Annotated[
        list[str] | None, typer.Argument(help="Directories, .gguf files or hub ids.", metavar="[MODEL...]")
    ] = None,
    served_model_name: Annotated[
        list[str] | None, typer.Option(help="Model name for clients; once for each MODEL, in the same order.")
    ] = None,
    insecure_no_keys: Annotated[
        bool,
        typer.Option(
            "--insecure-no-keys",
            help="Accept any client on other machines, without keys.",
            rich_help_panel=Group.SERVER.value,
        ),
    ] = False,
    replicas: Annotated[
        int,
        typer.Option(
            min=1,
            max=64,
            help="Members that run the one MODEL on this machine, each with a part of its memory and cores.",
            rich_help_panel=Group.SERVER.value,
        ),
    ] = 1,
) -> None:
    """Serve models over HTTP, with the API that OpenAI clients use.

    Models that are named here are loaded at start and stay loaded. Those of the settings file ([models.NAME]) and of
    --models-folder are loaded on the first request and unloaded when memory is needed.
    """
    settings.server.check_keys_file()
    served = collect_models(models or [], served_model_name or [], settings)
    if replicas > 1:
        serve_replicas(served, settings, replicas, allow_no_keys=insecure_no_keys)
        return
    serve_models(served, settings, allow_no_keys=insecure_no_keys)


def collect_models(models: list[str], names: list[str], settings: Settings) -> "tuple[OnDemandModel, ...]":
    """Collect the models of the command line, the settings file and the models folder. An entry of the settings file
    replaces a model in the folder with the same name. Raises ConfigError if there are no models."""
    from quire.config.parked_models import OnDemandModel, all_models

    named = [OnDemandModel(name, model, is_kept=True) for name, model in public_names(models, names).items()]
    in_folder: list[OnDemandModel] = []
    if settings.server.models_folder is not None:
        from quire.client.engines.park_plan import models_in

        configured = {model.name for model in settings.parked}
        in_folder = [entry for entry in models_in(settings.server.models_folder) if entry.name not in configured]
    served = all_models(named, settings.parked, in_folder)
    if not served:
        raise ConfigError(
            "expected at least one model, got 0; pass a MODEL, set --models-folder to a folder with models, or add "
            "a [models.NAME] to the settings file"
        )
    return served


def serve_models(
    models: "Sequence[OnDemandModel]",
    settings: Settings,
    *,
    allow_no_keys: bool = False,
    on_ready: Callable[[str], None] | None = None,
) -> None:
    """Serve until a shutdown signal; `on_ready` is called with the URL when the server is ready."""
    import gc
    from contextlib import closing

    from quire.api.listening import public_socket
    from quire.cli.shared.machine_warnings import machine_warnings
    from quire.worker.parent.spawned_worker import SpawnedWorker

    gc.disable()  # imports are faster without it; freeze_startup_objects enables it again
    # Bind the address first. Then spawn a worker, which imports its modules on one core while this process imports its
    # own on another.
    with (
        without_mode(sys.stderr, termios.ECHOCTL),  # otherwise the terminal prints ^C in the middle of a line
        public_socket(settings.server, allow_no_keys=allow_no_keys) as listener,
        closing(SpawnedWorker(settings.serving.queue + settings.model.max_running)) as first,
    ):
        prepare_server(settings)
        for warning in machine_warnings(settings.model):
            print_line(warning)
        run_until_shutdown(_serve(models, settings, first, listener, allow_no_keys, on_ready))


async def _serve(
    models: "Sequence[OnDemandModel]",
    settings: Settings,
    first: "SpawnedWorker",
    listener: "socket",
    allow_no_keys: bool,
    on_ready: Callable[[str], None] | None,
) -> int:
    """Serve, and return the number of requests that were cancelled at shutdown."""
    import asyncio

    from quire.cli.serve.wiring import model_opener

    # These handlers are active until the server installs its own; all code that runs before then can be cancelled.
    if (task := asyncio.current_task()) is not None:
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    async with model_opener(models, settings, first) as opener:
        # This import takes most of a second; the worker loads the model in the meantime.
        serving = await asyncio.to_thread(import_module, "quire.api.serving")
        plan = serving.Plan(models, settings, allow_no_keys, on_ready, opener.weigh, listener)
        num_cancelled: int = await serving.run(plan, print_line, opener.open)
        return num_cancelled


def serve_replicas(
    models: "Sequence[OnDemandModel]", settings: Settings, num_replicas: int, *, allow_no_keys: bool
) -> None:
    """Serve until a shutdown signal, with a gateway in this process and each member in a separate process."""
    import asyncio

    from quire.api.serving import Plan, run

    if len(models) != 1:
        raise ConfigError(
            f"expected one model with --replicas, got {len(models)}; pass only one MODEL, or omit --replicas"
        )
    if settings.server.trace is not None:
        message = f"expected one worker with --trace, got {num_replicas} replicas; omit --trace or --replicas"
        raise ConfigError(message, code="trace_with_replicas")
    prepare_server(settings)

    @asynccontextmanager
    async def open_fleet(model: "OnDemandModel", _progress: object) -> "AsyncIterator[FleetModel]":
        from quire.fleet.member.replicas import replica_spec, replicated_model

        order = await asyncio.to_thread(
            replica_spec, model.model, num_replicas, settings.model, settings.serving, settings.server.drain_s
        )
        async with replicated_model(model.name, order, num_replicas, settings.serving.queue) as client:
            yield client

    run_until_shutdown(run(Plan(models, settings, allow_no_keys), print_line, open_fleet))


def public_names(models: list[str], served_names: list[str]) -> dict[str, str]:
    """Map names for clients to models. A name is the served name, else the path's last part, else the hub id."""
    if served_names and len(served_names) != len(models):
        message = f"expected --served-model-name once per MODEL ({len(models)}), got {len(served_names)}; or omit it"
        raise ConfigError(message, code="wrong_num_names")
    names = served_names or [_name_of(model) for model in models]
    if len(set(names)) != len(names):
        raise ConfigError(f"expected distinct model names, got {', '.join(names)}; set --served-model-name for each")
    return dict(zip(names, models, strict=True))


def _name_of(model: str) -> str:
    path = expand_home(model, "name the model by its full path")
    if not path.exists():
        return model
    name = path.resolve().name
    return name.removesuffix(".gguf")
