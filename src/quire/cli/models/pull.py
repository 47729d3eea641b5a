"""`quire pull` and `quire rm`: download models from the Hugging Face hub, and remove models."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from quire.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from quire.checkpoints.hub.variants import Verdict

EPILOG = """\
\b
Without a quantisation the best file that fits the memory is chosen; a table shows why.
\b
Examples:
  quire pull org/name
  quire pull org/name:Q4_K_M
"""


def pull(
    model: Annotated[str, typer.Argument(help="A hub id: org/name, or org/name:Q4_K_M.", metavar="MODEL")],
    memory: Annotated[
        str | None,
        typer.Option(help="Memory that the model must fit in, such as 8GiB; default: half of this machine's."),
    ] = None,
) -> None:
    """Fetch a model from the Hugging Face hub, or update one that is on this machine.

    An interrupted download resumes. Size and hash of every file are checked against those of the hub; a file that
    differs is discarded.
    """
    from quire.checkpoints.hub.files import HubName
    from quire.checkpoints.hub.files import pull as fetch
    from quire.cli.shared.background import with_progress
    from quire.config.machine import memory_for_models_bytes

    hub_name = HubName.parse(model)
    if hub_name is None:
        message = f"expected a hub id org/name or org/name:Q4_K_M, got {model[:200]!r}; check the spelling"
        raise CheckpointError(message, code="invalid_model_name")
    limit = _memory_bytes(memory) or memory_for_models_bytes()
    typer.echo(str(with_progress(lambda report: fetch(hub_name, limit, report, show_choice))))


def fetch_model(model: str, *, memory_bytes: int | None = None) -> Path:
    """Return the model's file or folder. A model that is not on this machine is downloaded first, with progress."""
    from quire.checkpoints.names import local_path
    from quire.cli.shared.background import with_progress

    return with_progress(lambda report: local_path(model, report, show_choice, memory_bytes))


def show_choice(variants: "list[Verdict]") -> None:
    """Print a table of a model's variants: which of them fit, and which is selected."""
    from quire.cli.shared.columns import columns

    rows = [
        (">" if one.is_selected else "", one.variant.label, f"{one.variant.size_bytes / 1e9:,.2f} GB", one.reason)
        for one in variants
    ]
    typer.echo(columns(("", "quantisation", "size", "why"), rows, right=frozenset({2})), err=True)


def rm(
    model: Annotated[str, typer.Argument(help="A name that quire models lists.", metavar="MODEL")],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
) -> None:
    """Remove a model from this machine."""
    import shutil

    from quire.cli.models.commands import local_models

    copies = [local for local in local_models() if local.name == model]
    if not copies:
        message = f"expected a name that quire models lists, got {model[:200]!r}; choose a listed name"
        raise CheckpointError(message, code="model_not_found")
    size_bytes = sum(copy.size_bytes for copy in copies)
    for copy in copies:
        typer.echo(f"{copy.path}", err=True)
    if not yes and not typer.confirm(f"remove {size_bytes / 1e9:,.2f} GB?", err=True):
        raise typer.Exit(1)
    for copy in copies:
        if copy.path.is_dir():
            shutil.rmtree(copy.path)
        else:
            copy.path.unlink()
    typer.echo(f"removed {model}, {size_bytes / 1e9:,.2f} GB", err=True)


def _memory_bytes(text: str | None) -> int | None:
    if text is None:
        return None
    from quire.config.kinds import SIZE

    try:
        size = SIZE.parse(text)
    except ValueError as error:
        raise ConfigError(f"expected memory to be {SIZE.rule}, got {text[:60]!r}", ("memory",)) from error
    return size if isinstance(size, int) else None
