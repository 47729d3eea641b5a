"""`quire config`: show the settings in force, the source of each value, and the settings files."""

import json
import os
from typing import TYPE_CHECKING, Annotated

import typer

from quire.cli.shared.flags import GroupedCommand, with_all_settings
from quire.config import SETTINGS, Settings

if TYPE_CHECKING:
    from quire.config.files import Candidate

config_app = typer.Typer(
    name="config",
    help="Show the settings in force and the files they come from.",
    no_args_is_help=True,
    rich_markup_mode=None,
    epilog="\b\nExamples:\n  quire config show\n  quire config path",
)
SHOW_EPILOG = """\
\b
A flag overrides the environment (QUIRE_MEMORY), the environment overrides the file
(memory = "4GiB" in quire.toml), the file overrides the default.
\b
Examples:
  quire config show
  quire config show --memory 4GiB --json
  QUIRE_MAX_RUNNING=32 quire config show
"""
PATH_EPILOG = "\b\nExamples:\n  quire config path\n  QUIRE_CONFIG=~/other.toml quire config path"


@config_app.command(epilog=SHOW_EPILOG, cls=GroupedCommand)
@with_all_settings
def show(
    settings: Settings,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
) -> None:
    """Show every setting, its value and its source. Flags are applied as for a server."""
    if as_json:
        fields = {name: {"value": entry.value, "source": entry.source} for name, entry in settings.values.items()}
        typer.echo(json.dumps({"file": settings.file, "settings": fields}, default=str))
        return
    from quire.cli.shared.columns import columns

    values = settings.values
    rows = [(item.name, item.show(values[item.name].value), values[item.name].source) for item in SETTINGS]
    typer.echo(columns(("setting", "value", "source"), rows))


@config_app.command(epilog=PATH_EPILOG)
def path(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON array instead of a table.")] = False,
) -> None:
    """Show the possible settings files in order. Only the first that exists is read."""
    from quire.cli.shared.columns import columns
    from quire.config.files import candidates, settings_file

    selected = settings_file(os.environ)
    rows = [(one.path, _state(one, is_selected=one.path == selected), one.why) for one in candidates(os.environ)]
    if as_json:
        typer.echo(json.dumps([{"path": str(file), "state": state, "why": why} for file, state, why in rows]))
        return
    table = [(state, str(file), why) for file, state, why in rows]
    typer.echo(columns(("state", "file", "location"), table))
    if selected is None:
        typer.echo("\nno settings file found: every setting comes from a flag, a variable or its default", err=True)
        typer.echo(f'hint: create {rows[0][0]}, for example with: memory = "4GiB"', err=True)


def _state(candidate: "Candidate", *, is_selected: bool) -> str:
    if not candidate.path.is_file():
        return "missing" if is_selected else "absent"
    return "read" if is_selected else "not read"
