"""`quire pull` and `quire rm`: models of the hub come to this machine, and leave it."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from quire.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from quire.checkpoints.hub.variants import Judged

EPILOG = """\
\b
Without a quantisation the best file that fits the memory is taken; a table says why.
\b
Examples:
  quire pull org/name
  quire pull org/name:Q4_K_M
"""


def pull(
    model: Annotated[str, typer.Argument(help="A hub id: org/name, or org/name:Q4_K_M.", metavar="MODEL")],
    memory: Annotated[
        str | None,
        typer.Option(help="What the model must fit in, such as 8GiB; default: half of this machine's memory."),
    ] = None,
) -> None:
    """Fetch a model from the Hugging Face hub, or what is newer there of one that is here.

    A download that broke off goes on where it was. Size and hash of every file are checked against what the hub tells;
    nothing is kept that differs.
    """
    from quire.checkpoints.hub.files import HubName
    from quire.checkpoints.hub.files import pull as fetch
    from quire.checkpoints.progress import show_progress
    from quire.cli.shared.background import in_background
    from quire.config.machine import memory_for_models_bytes

    wanted = HubName.parsed(model)
    if wanted is None:
        raise CheckpointError(f"a hub id is org/name or org/name:Q4_K_M, {model[:200]!r} given; check the spelling")
    limit = _memory_bytes(memory) or memory_for_models_bytes()
    with show_progress() as progress:
        path = in_background(lambda tell: fetch(wanted, limit, tell, show_choice), progress).result()
    typer.echo(str(path))


def pulled(model: str, *, memory_bytes: int | None = None) -> Path:
    """The model's file or folder; fetched if it is not here, and shown on the way."""
    from quire.checkpoints.names import local_path
    from quire.checkpoints.progress import show_progress
    from quire.cli.shared.background import in_background

    with show_progress() as progress:
        return in_background(lambda tell: local_path(model, tell, show_choice, memory_bytes), progress).result()


def show_choice(judged: "list[Judged]") -> None:
    """A table of what there is, what fits, and what was taken."""
    from quire.cli.shared.columns import columns

    rows = [
        (">" if one.is_taken else "", one.variant.label, f"{one.variant.size_bytes / 1e9:,.2f} GB", one.verdict)
        for one in judged
    ]
    typer.echo(columns(("", "quantisation", "size", "why"), rows, right=frozenset({2})), err=True)


def rm(
    model: Annotated[str, typer.Argument(help="A name that quire models prints.", metavar="MODEL")],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Remove a model from this machine."""
    import shutil

    from quire.cli.models.commands import all_found

    found = [one for one in all_found() if one.name == model]
    if not found:
        raise CheckpointError(f"{model[:200]!r} is not among the models that quire keeps; name one that it prints")
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


def _memory_bytes(given: str | None) -> int | None:
    if given is None:
        return None
    from quire.config.kinds import SIZE

    try:
        size = SIZE.parse(given)
    except ValueError as error:
        raise ConfigError(f"memory must be {SIZE.rule}; {given[:60]!r} given") from error
    return size if isinstance(size, int) else None
