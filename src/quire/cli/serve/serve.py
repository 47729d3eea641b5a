"""`quire serve`: models behind an OpenAI-compatible API. Talk goes to stderr; Ctrl-C lets requests finish."""

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

    from quire.config import ParkedModel
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
        list[str] | None, typer.Option(help="What clients call a model; once for each MODEL, in their order.")
    ] = None,
    insecure_no_keys: Annotated[
        bool,
        typer.Option(
            "--insecure-no-keys",
            help="Let other machines in without keys. Anybody can use the server.",
            rich_help_panel=Group.SERVER.value,
        ),
    ] = False,
    replicas: Annotated[
        int,
        typer.Option(
            min=1,
            max=64,
            help="Members that compute the one MODEL on this machine, each with a part of its memory and cores.",
            rich_help_panel=Group.SERVER.value,
        ),
    ] = 1,
) -> None:
    """Serve models over HTTP, with the API that OpenAI clients speak.

    Models that are named here are loaded at once and stay. Those of the settings file ([models.NAME]) and of
    --models-folder are loaded when they are asked for, and leave when memory is needed.
    """
    settings.server.check_keys_file()
    served = all_served(models or [], served_model_name or [], settings)
    if replicas > 1:
        from quire.cli.serve.replicas import serve_replicas

        serve_replicas(served, settings, replicas, allow_no_keys=insecure_no_keys)
        return
    serve_models(served, settings, allow_no_keys=insecure_no_keys)


def all_served(models: list[str], names: list[str], settings: Settings) -> "tuple[ParkedModel, ...]":
    """Those of the command line, of the settings file and of the folder. What the file says of a file of the folder
    holds for that."""
    from quire.config.parked_models import ParkedModel, all_models

    named = [ParkedModel(name, model, is_kept=True) for name, model in public_names(models, names).items()]
    in_folder: list[ParkedModel] = []
    if settings.server.models_folder is not None:
        from quire.client.engines.park_plan import models_in

        told = {one.name for one in settings.parked}
        in_folder = [one for one in models_in(settings.server.models_folder) if one.name not in told]
    served = all_models(named, settings.parked, in_folder)
    if not served:
        raise ConfigError(
            "a server needs at least one model, 0 given; name one, give --models-folder a folder that has some, or "
            "write a [models.NAME] into the settings file"
        )
    return served


def serve_models(
    models: "Sequence[ParkedModel]",
    settings: Settings,
    *,
    allow_no_keys: bool = False,
    on_ready: Callable[[str], None] | None = None,
) -> None:
    """Until told to end; `on_ready` hears the address."""
    import gc
    from contextlib import closing

    from quire.api.listening import public_socket
    from quire.worker.parent.spawned_worker import SpawnedWorker

    gc.disable()  # while everything is imported; set_aside_what_was_loaded switches it on again
    # The address is ours before anything is begun. Then a worker: it imports on one core what it needs, while we do on
    # another.
    with (
        public_socket(settings.server, allow_no_keys=allow_no_keys) as listener,
        closing(SpawnedWorker(settings.serving.queue + settings.model.max_running)) as first,
    ):
        num_ended = _serve(models, settings, first, listener, allow_no_keys, on_ready)
    if num_ended:
        typer.echo(f"{num_ended} requests were not done in time and were ended", err=True)


def _serve(
    models: "Sequence[ParkedModel]",
    settings: Settings,
    first: "SpawnedWorker",
    listener: "socket",
    allow_no_keys: bool,
    on_ready: Callable[[str], None] | None,
) -> int:
    """How many requests had to be ended."""
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
        _say(warning)

    async def serve_until_ended() -> int:
        _end_when_told(asyncio.get_running_loop(), asyncio.current_task())
        async with supervised(models, settings, first) as wiring:
            # Beside the worker, which loads by now: it takes most of a second.
            serving = await asyncio.to_thread(import_module, "quire.api.serving")
            plan = serving.Plan(models, settings, allow_no_keys, on_ready, wiring.weigh, listener)
            num_ended: int = await serving.run(plan, _say, wiring.opening)
            return num_ended

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        try:
            return runner.run(serve_until_ended())
        except asyncio.CancelledError:  # told to end before there was anything to serve
            return 0


def _end_when_told(loop: "AbstractEventLoop", task: "Task[int] | None") -> None:
    """Until the server listens to signals itself: nothing runs yet that could not be broken off."""
    from quire.observe.access_log import end_typed_line

    def end(task: "Task[int]", number: int) -> None:
        if number == signal.SIGINT:
            end_typed_line()
        task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        if task is not None:
            loop.add_signal_handler(number, end, task, number)


def _say(line: str) -> None:
    typer.echo(line, err=True)


def public_names(models: list[str], given: list[str]) -> dict[str, str]:
    """What is loaded by the name clients use: the given one, else the path's last part, else the hub id."""
    if given and len(given) != len(models):
        raise ConfigError(
            f"served_model_name must be said once for each of {len(models)} models, {len(given)} given; or not at all"
        )
    names = given or [_name_of(model) for model in models]
    if len(set(names)) != len(names):
        raise ConfigError(f"names of models must differ, {', '.join(names)} given; say --served-model-name for each")
    return dict(zip(names, models, strict=True))


def _name_of(model: str) -> str:
    path = expanded(model, "name the model by its full path")
    if not path.exists():
        return model
    name = path.resolve().name
    return name.removesuffix(".gguf")
