"""`quire pull` and `quire rm`: download models from the Hugging Face hub, and remove models."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from quire.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from quire.checkpoints.hub.variants import Judged

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

    wanted = HubName.parsed(model)
    if wanted is None:
        rule = f"expected a hub id org/name or org/name:Q4_K_M, got {model[:200]!r}; check the spelling"
        raise CheckpointError(rule, code="invalid_model_name")
    limit = _memory_bytes(memory) or memory_for_models_bytes()
    typer.echo(str(with_progress(lambda report: fetch(wanted, limit, report, show_choice))))


def pulled(model: str, *, memory_bytes: int | None = None) -> Path:
    """Return the model's file or folder. A model that is not on this machine is downloaded first, with progress."""
    from quire.checkpoints.names import local_path
    from quire.cli.shared.background import with_progress

    return with_progress(lambda report: local_path(model, report, show_choice, memory_bytes))


def show_choice(judged: "list[Judged]") -> None:
    """Print a table of a model's variants: which of them fit, and which was chosen."""
    from quire.cli.shared.columns import columns

    rows = [
        (">" if one.is_taken else "", one.variant.label, f"{one.variant.size_bytes / 1e9:,.2f} GB", one.verdict)
        for one in judged
    ]
    typer.echo(columns(("", "quantisation", "size", "why"), rows, right=frozenset({2})), err=True)


def rm(
    model: Annotated[str, typer.Argument(help="A name that quire models lists.", metavar="MODEL")],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
) -> None:
    """Remove a model from this machine."""
    import shutil

    from quire.cli.models.commands import all_found

    found = [one for one in all_found() if one.name == model]
    if not found:
        rule = f"expected a name that quire models lists, got {model[:200]!r}; choose one of those"
        raise CheckpointError(rule, code="model_not_found")
    size_bytes = sum(one.size_bytes for one in found)
    for one in found:
        typer.echo(f"{one.path}", err=True)
    if not yes and not typer.confirm(f"remove {size_bytes / 1e9:,.2f} GB?", err=True):
        raise typer.Exit(1)
    for one in found:
        if one.path.is_dir():
            shutil.rmtree(one.path)
        else:
            one.path.unlink()
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
