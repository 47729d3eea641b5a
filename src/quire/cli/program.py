"""The `quire` command: every subcommand in the order in which `quire --help` lists them."""

import sys
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperGroup

from quire.cli.agents import launch
from quire.cli.chat import chat, explain, generate
from quire.cli.config import config_app
from quire.cli.doctor import doctor
from quire.cli.keys import keys_app
from quire.cli.models import info, pull
from quire.cli.models.commands import models_app
from quire.cli.serve import run, serve
from quire.cli.shared.background import leave_background
from quire.cli.shared.flags import GroupedCommand
from quire.cli.sim import plan, replay, sim
from quire.cli.watch import dashboard, top
from quire.config import check_variable
from quire.errors import CheckpointError, QuireError


def _lazy_group(module: str, app_name: str, **settings: Any) -> typer.Typer:
    """Return a stand-in for the Typer `app_name` of `module`. The module is imported on first use, because it defines
    many flags and `quire --help` must stay quick."""

    class LazyGroup(TyperGroup):
        """Forwards to the real group and imports it when needed."""

        def list_commands(self, ctx: Any) -> list[str]:
            return list(_group_of(module, app_name).list_commands(ctx))

        def get_command(self, ctx: Any, cmd_name: str) -> Any:
            return _group_of(module, app_name).get_command(ctx, cmd_name)

    app = typer.Typer(cls=LazyGroup, no_args_is_help=True, rich_markup_mode=None, **settings)
    app.callback()(lambda: None)
    return app


def _group_of(module: str, app_name: str) -> Any:
    return typer.main.get_command(getattr(import_module(module), app_name))


app = typer.Typer(
    name="quire",
    help="Serve language models to many people and agents from one paged KV memory. A prefix is computed once for all "
    "keys that share a cache group.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.command(epilog=run.EPILOG, cls=GroupedCommand)(run.run)
app.command(epilog=serve.EPILOG, cls=GroupedCommand)(serve.serve)
app.add_typer(keys_app)
app.add_typer(models_app)
app.command(epilog=pull.EPILOG)(pull.pull)
app.command(epilog="Example: quire rm org/name")(pull.rm)
app.command(epilog=info.EPILOG)(info.info)
app.add_typer(config_app)
app.command(epilog=doctor.EPILOG)(doctor.doctor)
app.command(
    epilog="Examples: quire generate model.gguf 'Once upon a time'; echo hello | quire generate model.gguf -",
    cls=GroupedCommand,
)(generate.generate)
app.command(
    epilog="Examples: quire chat model.gguf; quire chat --url http://127.0.0.1:8000",
    cls=GroupedCommand,
)(chat.chat)
app.command(epilog=launch.EPILOG)(launch.launch)
app.command(epilog="Example: quire connect codex")(launch.connect)
app.command(epilog=explain.EPILOG)(explain.explain)
app.command(epilog=top.EPILOG)(top.top)
app.command(epilog=dashboard.EPILOG)(dashboard.dashboard)
app.command(epilog="Example: quire sim --scenario agents --seed 7")(sim.sim)
app.command(epilog=plan.EPILOG)(plan.plan)
app.command(epilog=replay.EPILOG)(replay.replay)
app.add_typer(
    _lazy_group(
        "quire.cli.bench.commands",
        "bench_app",
        name="bench",
        help="Measure any OpenAI-compatible server, or this machine's engine.",
        epilog="\b\nExamples:\n  quire bench serve --url http://localhost:8000\n  quire bench engine model.gguf",
    )
)
app.add_typer(
    _lazy_group(
        "quire.cli.fleet.commands",
        "fleet_app",
        name="fleet",
        help="Serve a model on many machines behind one gateway. One machine needs only `quire serve`.",
        epilog="\b\nExamples:\n  quire fleet member model.gguf --listen tcp://127.0.0.1:7000\n"
        "  quire fleet gateway --members members.txt",
    )
)


def _print_version(is_requested: bool) -> None:
    if is_requested:
        from quire import __version__

        typer.echo(f"quire {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: bool = typer.Option(False, "--version", help="Print the version.", callback=_print_version, is_eager=True),
) -> None:
    check_variable("instruction_set")  # checked here because some commands load no settings


def _hint(error: QuireError) -> str:
    """Return the hint for a failed model lookup: the list of models. Other errors contain their own advice."""
    return "\n\nhint: quire models lists what is on this machine" if isinstance(error, CheckpointError) else ""


def main() -> None:
    """Run the `quire` command and exit with its code."""
    try:
        app()
    except QuireError as error:
        typer.echo(f"error: {error}{_hint(error)}", err=True)
        code = 2
    except SystemExit as exit_error:
        code = exit_error.code if isinstance(exit_error.code, int) else 0
    leave_background(code)
    sys.exit(code)
