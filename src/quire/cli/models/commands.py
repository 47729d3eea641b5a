"""`quire models`: models on this machine. Reads folders only: no weights, no network."""

import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from quire.cli.models.model_moves import request_load, request_unload
from quire.config.home import expanded

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


@dataclass(frozen=True, slots=True)
class Found:
    """A model on disk, possibly incomplete."""

    name: str
    kind: str
    size_bytes: int
    path: Path

    @property
    def last_used_s(self) -> float | None:
        """When any of its files was last read, by the system's clock: exact to a day, as most disks keep it."""
        return max((times for path in _below(self.path) if (times := _read_at_s(path)) is not None), default=None)


models_app = typer.Typer(
    name="models",
    help="List the models on this machine, or have a server load or unload one.",
    epilog=EPILOG,
    rich_markup_mode=None,
)
models_app.command("load")(request_load)
models_app.command("unload")(request_unload)


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


def list_models(as_json: bool) -> None:
    """Print the models on this machine, as a table or JSON."""
    import json

    found = all_found()
    if as_json:
        rows = [
            {
                "name": one.name,
                "kind": one.kind,
                "size_bytes": one.size_bytes,
                "last_used_s": one.last_used_s,
                "path": str(one.path),
            }
            for one in found
        ]
        typer.echo(json.dumps(rows))
    elif found:
        _print_table(found)
    else:
        from quire.checkpoints.cache import cache_folder

        typer.echo(f"There are no models in {cache_folder()} and none in {hub_folder(os.environ)}.")
        typer.echo(
            "\nhint: quire pull org/name fetches a model from the Hugging Face hub; a .gguf file or a directory is "
            "used by its path and need not be in these folders",
            err=True,
        )


def all_found() -> list[Found]:
    """All models on this machine."""
    from quire.checkpoints.cache import cache_folder

    return [*in_cache(cache_folder()), *in_hub(hub_folder(os.environ))]


def hub_folder(environ: Mapping[str, str]) -> Path:
    """Where the hub's library keeps its models: $HF_HUB_CACHE, else hub/ in $HF_HOME, else in the user's cache."""
    if chosen := environ.get("HF_HUB_CACHE") or environ.get("HUGGINGFACE_HUB_CACHE"):
        return expanded(chosen, "HF_HUB_CACHE to a full path")
    if home := environ.get("HF_HOME"):
        return expanded(home, "HF_HOME to a full path") / "hub"
    return expanded(environ.get("XDG_CACHE_HOME") or "~/.cache", "HF_HOME") / "huggingface" / "hub"


def in_cache(cache: Path) -> Iterator[Found]:
    """Conversions and files of quire's own cache folder, by name."""
    from quire.checkpoints.cache import UNFINISHED

    for folder in _entries(cache / "converted"):
        if folder.name.startswith(UNFINISHED):
            yield Found(folder.name, "unfinished conversion", size_bytes(folder), folder)
        elif folder.is_dir():
            yield Found(_source_name(folder), "converted GGUF", size_bytes(folder), folder)
    for file in _entries(cache / "files"):
        if file.is_file():
            kind = "GGUF file" if file.suffix.lower() == ".gguf" else "file"
            yield Found(file.name, kind, size_bytes(file), file)


def in_hub(hub: Path) -> Iterator[Found]:
    """Models of the hub's cache, by name."""
    for folder in _entries(hub):
        if folder.name.startswith(HUB_PREFIX) and folder.is_dir():
            name = folder.name.removeprefix(HUB_PREFIX).replace("--", "/", 1)
            yield Found(name, _hub_kind(folder), size_bytes(folder), folder)


def _hub_kind(folder: Path) -> str:
    if any(folder.glob("blobs/*.incomplete")):
        return "hub, incomplete"
    if any(folder.glob("snapshots/*/**/*.gguf")):
        return "hub, GGUF"
    return "hub" if any(folder.glob("snapshots/*/*.safetensors")) else "hub, no weights"


def size_bytes(path: Path) -> int:
    """Bytes of the files here and below. Links count 0: their targets are counted where they are."""
    if path.is_symlink():
        return 0
    if path.is_dir():
        return sum(size_bytes(entry) for entry in _entries(path))
    try:
        return path.stat().st_size
    except OSError:  # gone meanwhile
        return 0


def _below(path: Path) -> Iterator[Path]:
    if path.is_dir() and not path.is_symlink():
        for entry in _entries(path):
            yield from _below(entry)
    elif not path.is_symlink():
        yield path


def _read_at_s(path: Path) -> float | None:
    try:
        return path.stat().st_atime
    except OSError:  # gone meanwhile
        return None


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:  # not there, or not ours to see
        return []


def _source_name(folder: Path) -> str:
    """The name of the file a conversion was made of, or the folder's if its note cannot be read."""
    from quire.checkpoints.directory import CONVERSION_NAME
    from quire.checkpoints.strict_json import read_json_object
    from quire.errors import CheckpointError

    try:
        source = read_json_object(folder / CONVERSION_NAME).get("source")
    except CheckpointError:
        source = None
    return source if isinstance(source, str) else folder.name


def _print_table(found: list[Found]) -> None:
    from quire.cli.shared.columns import columns

    rows = [
        (one.name, one.kind, f"{one.size_bytes / 1e6:,.1f} MB", _day(one.last_used_s), str(one.path)) for one in found
    ]
    typer.echo(columns(("name", "kind", "size", "last used", "path"), rows, right=frozenset({2})))


def _day(seconds: float | None) -> str:
    return "" if seconds is None else time.strftime("%Y-%m-%d", time.localtime(seconds))
