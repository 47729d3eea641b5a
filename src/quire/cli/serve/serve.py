"""`quire serve`: models behind an OpenAI-compatible API. Messages go to stderr; Ctrl-C lets requests finish."""

import signal
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Annotated

import typer

from quire.cli.shared.settings_flags import with_all_settings
from quire.config import Group, Settings
from quire.config.home import expanded
from quire.errors import ConfigError

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop, Task
    from socket import socket

    from quire.config import OnDemandModel
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
    served = all_served(models or [], served_model_name or [], settings)
    if replicas > 1:
        from quire.cli.serve.replicas import serve_replicas

        serve_replicas(served, settings, replicas, allow_no_keys=insecure_no_keys)
        return
    serve_models(served, settings, allow_no_keys=insecure_no_keys)


def all_served(models: list[str], names: list[str], settings: Settings) -> "tuple[OnDemandModel, ...]":
    """Models of the command line, the settings file and the models folder. An entry of the settings file replaces the
    folder's model of the same name."""
    from quire.config.parked_models import OnDemandModel, all_models

    named = [OnDemandModel(name, model, is_kept=True) for name, model in public_names(models, names).items()]
    in_folder: list[OnDemandModel] = []
    if settings.server.models_folder is not None:
        from quire.client.engines.park_plan import models_in

        configured = {one.name for one in settings.parked}
        in_folder = [one for one in models_in(settings.server.models_folder) if one.name not in configured]
    served = all_models(named, settings.parked, in_folder)
    if not served:
        raise ConfigError(
            "expected at least one model, got 0; name one, set --models-folder to a folder with models, or add a "
            "[models.NAME] to the settings file"
        )
    return served


def serve_models(
    models: "Sequence[OnDemandModel]",
    settings: Settings,
    *,
    allow_no_keys: bool = False,
    on_ready: Callable[[str], None] | None = None,
) -> None:
    """Serve until a shutdown signal; `on_ready` is called with the address."""
    import gc
    from contextlib import closing

    from quire.api.listening import public_socket
    from quire.cli.shared.ending import without_echoed_controls
    from quire.worker.parent.spawned_worker import SpawnedWorker

    gc.disable()  # while everything is imported; set_aside_what_was_loaded switches it on again
    # Bind the address before anything else. Then spawn a worker: it imports on one core while this process imports on
    # another.
    with (
        without_echoed_controls(),
        public_socket(settings.server, allow_no_keys=allow_no_keys) as listener,
        closing(SpawnedWorker(settings.serving.queue + settings.model.max_running)) as first,
    ):
        num_ended = _serve(models, settings, first, listener, allow_no_keys, on_ready)
    if num_ended:
        typer.echo(f"{num_ended} requests did not finish in time and were cancelled", err=True)


def _serve(
    models: "Sequence[OnDemandModel]",
    settings: Settings,
    first: "SpawnedWorker",
    listener: "socket",
    allow_no_keys: bool,
    on_ready: Callable[[str], None] | None,
) -> int:
    """Returns the number of requests that were cancelled."""
    import asyncio

    import uvloop

    from quire.api.http.descriptors import allow_many_connections
    from quire.cli.serve.wiring import supervised
    from quire.config.machine import beyond_the_machine
    from quire.observe.access_log import set_up

    set_up("json" if settings.server.log_format == "json" else "plain")
    many = allow_many_connections()
    beyond = beyond_the_machine(settings.model.memory_bytes, settings.model.num_threads)
    for warning in (*([] if many is None else [many]), *beyond):
        _print_line(warning)

    async def serve_until_ended() -> int:
        _end_on_signal(asyncio.get_running_loop(), asyncio.current_task())
        async with supervised(models, settings, first) as wiring:
            # In parallel with the worker, which is loading: this import takes most of a second.
            serving = await asyncio.to_thread(import_module, "quire.api.serving")
            plan = serving.Plan(models, settings, allow_no_keys, on_ready, wiring.weigh, listener)
            num_ended: int = await serving.run(plan, _print_line, wiring.opening)
            return num_ended

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        try:
            return runner.run(serve_until_ended())
        except asyncio.CancelledError:  # shut down before serving began
            return 0


def _end_on_signal(loop: "AbstractEventLoop", task: "Task[int] | None") -> None:
    """Signal handlers until the server installs its own: everything that runs before then can be cancelled."""
    for number in (signal.SIGINT, signal.SIGTERM):
        if task is not None:
            loop.add_signal_handler(number, task.cancel)


def _print_line(line: str) -> None:
    typer.echo(line, err=True)


def public_names(models: list[str], served_names: list[str]) -> dict[str, str]:
    """Models by the name for clients: the served name, else the path's last part, else the hub id."""
    if served_names and len(served_names) != len(models):
        rule = f"expected served_model_name once for each of {len(models)} models, got {len(served_names)}; or omit it"
        raise ConfigError(rule, code="wrong_num_names")
    names = served_names or [_name_of(model) for model in models]
    if len(set(names)) != len(names):
        raise ConfigError(f"expected distinct model names, got {', '.join(names)}; set --served-model-name for each")
    return dict(zip(names, models, strict=True))


def _name_of(model: str) -> str:
    path = expanded(model, "name the model by its full path")
    if not path.exists():
        return model
    name = path.resolve().name
    return name.removesuffix(".gguf")
