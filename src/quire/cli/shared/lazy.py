"""A group of commands that is imported when it is used: its flags are many, and `quire --help` must stay quick."""

from importlib import import_module
from typing import Any

import typer
from typer.core import TyperGroup


def lazy_group(module: str, app_name: str, **settings: Any) -> typer.Typer:
    """A stand-in for the Typer `app_name` of `module`, with the name and help passed here."""

    class Lazy(TyperGroup):
        """Forwards to the real group, importing it when needed."""

        def list_commands(self, ctx: Any) -> list[str]:
            return list(_group(module, app_name).list_commands(ctx))

        def get_command(self, ctx: Any, cmd_name: str) -> Any:
            return _group(module, app_name).get_command(ctx, cmd_name)

    app = typer.Typer(cls=Lazy, no_args_is_help=True, rich_markup_mode=None, **settings)
    app.callback()(lambda: None)
    return app


def _group(module: str, app_name: str) -> Any:
    return typer.main.get_command(getattr(import_module(module), app_name))
