"""The command line as a list: every command with its groups, such as ("fleet", "gateway")."""

from collections.abc import Iterator

import typer
from typer.core import TyperGroup

from quire.cli import app


def leaf_commands() -> list[tuple[str, ...]]:
    """Every command that does something itself."""
    return list(_below(typer.main.get_command(app), ()))


def _below(command: object, words: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    if not isinstance(command, TyperGroup):
        yield words
        return
    context = typer.Context(command)
    for name in command.list_commands(context):
        yield from _below(command.get_command(context, name), (*words, name))
