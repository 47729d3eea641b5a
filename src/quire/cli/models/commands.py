"""`quire models`: list the models on this machine, without reading weights and without network access."""

import json
import os
import stat
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated
from urllib.parse import quote

import typer

from quire.config.home import expand_home
from quire.errors import ConfigError

EPILOG = """\
\b
A model is named by its hub id (org/name) or by its path.
\b
Examples:
  quire models
  quire models --json
  quire info org/name
  quire rm org/name
  quire models load coder
"""
HUB_PREFIX = "models--"
LOAD_S = 900.0
"""Timeout of loading a model; a large model may take minutes."""
Name = Annotated[str, typer.Argument(help="Model name for clients.", metavar="NAME")]


@dataclass(frozen=True, slots=True)
class LocalModel:
    """A model on disk, possibly incomplete."""

    name: str
    kind: str
    size_bytes: int
    path: Path

    @property
    def last_used_s(self) -> float | None:
        """Latest access time of the model's files (Unix time); most file systems update access times once a day."""
        return max((stats.st_atime for stats in _file_stats(self.path)), default=None)


models_app = typer.Typer(
    name="models",
    help="List the models on this machine, or have a server load or unload one.",
    epilog=EPILOG,
    rich_markup_mode=None,
)


@models_app.callback(invoke_without_command=True)
def models(
    context: typer.Context,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON array instead of a table.")] = False,
) -> None:
    """List the models on this machine, or have a server load or unload one.

    The list covers quire's cache folder and that of the Hugging Face hub; no network is used.
    """
    if context.invoked_subcommand is None:
        list_models(as_json)


@models_app.command("load")
def request_load(name: Name) -> None:
    """Load a model on a server now, before the first request; returns when it is ready."""
    _request_change(name, "load", LOAD_S)


@models_app.command("unload")
def request_unload(name: Name) -> None:
    """Unload a model from a server after its last response; the next request loads it again."""
    _request_change(name, "unload")


def _request_change(name: str, verb: str, timeout_s: float = 10.0) -> None:
    from quire.cli.shared.found_servers import admin_request, running_servers

    servers = [server for server in running_servers() if server.find_model(name) is not None]
    if not servers:
        raise ConfigError(f"no server of yours on this machine has a model {name!r}; start one with: quire serve")
    if len(servers) > 1:
        urls = ", ".join(server.url for server in servers)
        message = f"expected one server with {name!r}, got {len(servers)} ({urls}); stop the others"
        raise ConfigError(message, code="several_servers")
    (server,) = servers
    model = server.find_model(name)
    public_name = name if model is None else model.name
    try:
        response = admin_request(server.socket_path, "POST", f"/models/{quote(public_name)}/{verb}", timeout_s)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{public_name} at {server.url}: {error}") from error
    typer.echo(f"{public_name} at {server.url}: {response['state']}", err=True)


def list_models(as_json: bool) -> None:
    """Print the models on this machine as a table or as JSON."""
    listed = local_models()
    if as_json:
        rows = [asdict(model) | {"path": str(model.path), "last_used_s": model.last_used_s} for model in listed]
        typer.echo(json.dumps(rows))
    elif listed:
        _print_table(listed)
    else:
        from quire.checkpoints.cache import cache_folder

        typer.echo(f"There are no models in {cache_folder()} and none in {hub_folder(os.environ)}.")
        typer.echo(
            "\nhint: quire pull org/name fetches a model from the Hugging Face hub; a .gguf file or a directory is "
            "used by its path and need not be in these folders",
            err=True,
        )


def local_models() -> list[LocalModel]:
    """Find all models on this machine."""
    from quire.checkpoints.cache import cache_folder

    return [*cached_models(cache_folder()), *hub_models(hub_folder(os.environ))]


def hub_folder(environ: Mapping[str, str]) -> Path:
    """Return the cache folder of the Hugging Face hub: $HF_HUB_CACHE, else $HF_HOME/hub, else in the user's cache."""
    if folder := environ.get("HF_HUB_CACHE") or environ.get("HUGGINGFACE_HUB_CACHE"):
        return expand_home(folder, "HF_HUB_CACHE to a full path")
    if home := environ.get("HF_HOME"):
        return expand_home(home, "HF_HOME to a full path") / "hub"
    return expand_home(environ.get("XDG_CACHE_HOME") or "~/.cache", "HF_HOME") / "huggingface" / "hub"


def cached_models(cache: Path) -> Iterator[LocalModel]:
    """Yield the conversions and the files in quire's own cache folder, each sorted by name."""
    from quire.checkpoints.cache import UNFINISHED

    for folder in _entries(cache / "converted"):
        if folder.name.startswith(UNFINISHED):
            yield LocalModel(folder.name, "unfinished conversion", size_bytes(folder), folder)
        elif folder.is_dir():
            yield LocalModel(_source_name(folder), "converted GGUF", size_bytes(folder), folder)
    for file in _entries(cache / "files"):
        if file.is_file():
            kind = "GGUF file" if file.suffix.lower() == ".gguf" else "file"
            yield LocalModel(file.name, kind, size_bytes(file), file)


def hub_models(hub: Path) -> Iterator[LocalModel]:
    """Yield the models in the hub's cache folder, sorted by name."""
    for folder in _entries(hub):
        if folder.name.startswith(HUB_PREFIX) and folder.is_dir():
            name = folder.name.removeprefix(HUB_PREFIX).replace("--", "/", 1)
            yield LocalModel(name, _hub_kind(folder), size_bytes(folder), folder)


def _hub_kind(folder: Path) -> str:
    if any(folder.glob("blobs/*.incomplete")):
        return "hub, incomplete"
    if any(folder.glob("snapshots/*/**/*.gguf")):
        return "hub, GGUF"
    return "hub" if any(folder.glob("snapshots/*/*.safetensors")) else "hub, no weights"


def size_bytes(path: Path) -> int:
    """Return the size of a file, or of all files in a folder and its subfolders."""
    return sum(stats.st_size for stats in _file_stats(path))


def _file_stats(path: Path) -> Iterator[os.stat_result]:
    """Yield the stats of a file, or of all files in a folder and its subfolders. Links are skipped."""
    tree = [] if path.is_symlink() else os.walk(path)
    for file in (path, *(Path(folder, name) for folder, _, names in tree for name in names)):
        with suppress(OSError):  # the file was deleted in the meantime
            stats = file.lstat()
            if stat.S_ISREG(stats.st_mode):
                yield stats


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:  # the folder does not exist or is not readable
        return []


def _source_name(folder: Path) -> str:
    """Return the name of the file from which a folder was converted, or the folder's name if that is not recorded."""
    from quire.checkpoints.directory import CONVERSION_NAME
    from quire.checkpoints.strict_json import read_json_object
    from quire.errors import CheckpointError

    try:
        source = read_json_object(folder / CONVERSION_NAME).get("source")
    except CheckpointError:
        source = None
    return source if isinstance(source, str) else folder.name


def _print_table(models: list[LocalModel]) -> None:
    from quire.cli.shared.columns import columns

    rows = [
        (one.name, one.kind, f"{one.size_bytes / 1e6:,.1f} MB", _day(one.last_used_s), str(one.path)) for one in models
    ]
    typer.echo(columns(("name", "kind", "size", "last used", "path"), rows, right=frozenset({2})))


def _day(seconds: float | None) -> str:
    return "" if seconds is None else time.strftime("%Y-%m-%d", time.localtime(seconds))
