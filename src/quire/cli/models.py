"""`quire models`: what is on this machine already. Looks at folders, opens no weights, asks no network."""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from quire.config.home import expanded

EPILOG = """\
\b
A model is named by its hub id (org/name) or by its path.
\b
Examples:
  quire models
  quire models --json
  quire info org/name
"""
HUB_PREFIX = "models--"


@dataclass(frozen=True, slots=True)
class Found:
    """A model, or what is left of one, on disk."""

    name: str
    kind: str
    size_bytes: int
    path: Path


def models(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON array instead of a table.")] = False,
) -> None:
    """List the models on this machine.

    Looks into quire's cache folder and into that of the Hugging Face hub, and asks no network.
    """
    import json

    from quire.checkpoints.cache import cache_folder

    cache, hub = cache_folder(), hub_folder(os.environ)
    found = [*in_cache(cache), *in_hub(hub)]
    if as_json:
        rows = [{"name": f.name, "kind": f.kind, "size_bytes": f.size_bytes, "path": str(f.path)} for f in found]
        typer.echo(json.dumps(rows))
    elif found:
        _print_table(found)
    else:
        typer.echo(f"There are no models in {cache} and none in {hub}.")
        typer.echo(
            "\nhint: quire info org/name fetches a model from the Hugging Face hub; a .gguf file or a directory is "
            "named by its path and need not be here",
            err=True,
        )


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
    return "hub" if any(folder.glob("snapshots/*/*.safetensors")) else "hub, no safetensors"


def size_bytes(path: Path) -> int:
    """Bytes of the files here and below. A link counts nothing: what it leads to is counted where it lies."""
    if path.is_symlink():
        return 0
    if path.is_dir():
        return sum(size_bytes(entry) for entry in _entries(path))
    try:
        return path.stat().st_size
    except OSError:  # gone meanwhile
        return 0


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
    from quire.cli.columns import columns

    rows = [(one.name, one.kind, f"{one.size_bytes / 1e6:,.1f} MB", str(one.path)) for one in found]
    typer.echo(columns(("name", "kind", "size", "path"), rows, right=frozenset({2})))
