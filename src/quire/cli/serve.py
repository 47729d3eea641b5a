"""`quire serve`: models behind an OpenAI-compatible API. Talk goes to stderr; Ctrl-C lets requests finish."""

import signal
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Annotated

import typer

from quire.cli.settings_flags import with_all_settings
from quire.config import Group, Settings
from quire.config.home import expanded
from quire.errors import ConfigError

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop, Task

    from quire.checkpoints import Progress
    from quire.worker.spawned_worker import SpawnedWorker

EPILOG = """\
\b
Examples:
  quire serve model.gguf
  quire serve ./llama ./qwen --port 8080
  quire keys add alice && quire serve org/name --host 0.0.0.0
"""


@with_all_settings
def serve(
    settings: Settings,
    models: Annotated[list[str], typer.Argument(help="Directories, .gguf files or hub ids.", metavar="MODEL...")],
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
) -> None:
    """Serve models over HTTP, with the API that OpenAI clients speak."""
    settings.server.check_keys_file()
    serve_models(public_names(models, served_model_name or []), settings, allow_no_keys=insecure_no_keys)


def serve_models(
    names: Mapping[str, str],
    settings: Settings,
    *,
    allow_no_keys: bool = False,
    on_ready: Callable[[str], None] | None = None,
) -> None:
    """Until told to end; `on_ready` hears the address."""
    import gc
    from contextlib import closing

    from quire.worker.spawned_worker import SpawnedWorker

    gc.disable()  # while everything is imported; set_aside_what_was_loaded switches it on again
    # First of all: it imports on one core what it needs, while we do on another.
    with closing(SpawnedWorker(settings.serving.queue + settings.model.max_running)) as first:
        num_ended = _serve(names, settings, first, allow_no_keys, on_ready)
    if num_ended:
        typer.echo(f"{num_ended} requests were not done in time and were ended", err=True)


def _serve(
    names: Mapping[str, str],
    settings: Settings,
    first: "SpawnedWorker",
    allow_no_keys: bool,
    on_ready: Callable[[str], None] | None,
) -> int:
    """How many requests had to be ended."""
    import asyncio

    import uvloop

    from quire.api.http.descriptors import allow_many_connections
    from quire.checkpoints.progress import show_progress
    from quire.cli.wiring import supervised
    from quire.observe.access_log import set_up

    set_up("json" if settings.server.log_format == "json" else "plain")
    if (warning := allow_many_connections()) is not None:
        _say(warning)

    async def serve_until_ended(progress: "Progress") -> int:
        _end_when_told(asyncio.get_running_loop(), asyncio.current_task())
        async with supervised([*names.values()], settings, progress, first) as opening:
            # Beside the worker, which loads by now: it takes most of a second.
            serving = await asyncio.to_thread(import_module, "quire.api.serving")
            num_ended: int = await serving.run(serving.Plan(names, settings, allow_no_keys, on_ready), _say, opening)
            return num_ended

    with show_progress() as progress, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        try:
            return runner.run(serve_until_ended(progress))
        except asyncio.CancelledError:  # told to end before there was anything to serve
            return 0


def _end_when_told(loop: "AbstractEventLoop", task: "Task[int] | None") -> None:
    """Until the server listens to signals itself: nothing runs yet that could not be broken off."""
    for number in (signal.SIGINT, signal.SIGTERM):
        if task is not None:
            loop.add_signal_handler(number, task.cancel)


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
