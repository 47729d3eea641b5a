"""The `quire` command: every subcommand in the order in which `quire --help` lists them."""

import sys

import typer

from quire.cli.agents.launch import EPILOG as LAUNCH_EPILOG
from quire.cli.agents.launch import connect, launch
from quire.cli.chat.chat import chat
from quire.cli.chat.explain import EPILOG as EXPLAIN_EPILOG
from quire.cli.chat.explain import explain
from quire.cli.chat.generate import generate
from quire.cli.config import config_app
from quire.cli.doctor.doctor import EPILOG as DOCTOR_EPILOG
from quire.cli.doctor.doctor import doctor
from quire.cli.keys import keys_app
from quire.cli.models.commands import models_app
from quire.cli.models.info import EPILOG as INFO_EPILOG
from quire.cli.models.info import info
from quire.cli.models.pull import EPILOG as PULL_EPILOG
from quire.cli.models.pull import pull, rm
from quire.cli.serve.run import EPILOG as RUN_EPILOG
from quire.cli.serve.run import run
from quire.cli.serve.serve import EPILOG as SERVE_EPILOG
from quire.cli.serve.serve import serve
from quire.cli.shared.background import leave_background
from quire.cli.shared.grouped_help import GroupedCommand
from quire.cli.shared.lazy import lazy_group
from quire.cli.sim.plan import EPILOG as PLAN_EPILOG
from quire.cli.sim.plan import plan
from quire.cli.sim.replay import EPILOG as REPLAY_EPILOG
from quire.cli.sim.replay import replay
from quire.cli.sim.sim import sim
from quire.cli.watch.dashboard import EPILOG as DASHBOARD_EPILOG
from quire.cli.watch.dashboard import dashboard
from quire.cli.watch.top import EPILOG as TOP_EPILOG
from quire.cli.watch.top import top
from quire.errors import CheckpointError, QuireError

app = typer.Typer(
    name="quire",
    help="Serve language models to many people and agents from one paged KV memory. A prefix is computed once for all "
    "keys that share a cache group.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.command(epilog=RUN_EPILOG, cls=GroupedCommand)(run)
app.command(epilog=SERVE_EPILOG, cls=GroupedCommand)(serve)
app.add_typer(keys_app)
app.add_typer(models_app)
app.command(epilog=PULL_EPILOG)(pull)
app.command(epilog="Example: quire rm org/name")(rm)
app.command(epilog=INFO_EPILOG)(info)
app.add_typer(config_app)
app.command(epilog=DOCTOR_EPILOG)(doctor)
app.command(
    epilog="Examples: quire generate model.gguf 'Once upon a time'; echo hello | quire generate model.gguf -",
    cls=GroupedCommand,
)(generate)
app.command(
    epilog="Examples: quire chat model.gguf; quire chat --url http://127.0.0.1:8000",
    cls=GroupedCommand,
)(chat)
app.command(epilog=LAUNCH_EPILOG)(launch)
app.command(epilog="Example: quire connect codex")(connect)
app.command(epilog=EXPLAIN_EPILOG)(explain)
app.command(epilog=TOP_EPILOG)(top)
app.command(epilog=DASHBOARD_EPILOG)(dashboard)
app.command(epilog="Example: quire sim --scenario agents --seed 7")(sim)
app.command(epilog=PLAN_EPILOG)(plan)
app.command(epilog=REPLAY_EPILOG)(replay)
app.add_typer(
    lazy_group(
        "quire.cli.bench.commands",
        "bench_app",
        name="bench",
        help="Measure any OpenAI-compatible server, or this machine's engine.",
        epilog="\b\nExamples:\n  quire bench serve --url http://localhost:8000\n  quire bench engine model.gguf",
    )
)


app.add_typer(
    lazy_group(
        "quire.cli.fleet.commands",
        "fleet_app",
        name="fleet",
        help="Serve a model on many machines behind one gateway. One machine needs only `quire serve`.",
        epilog="\b\nExamples:\n  quire fleet member model.gguf --listen tcp://127.0.0.1:7000\n"
        "  quire fleet gateway --members members.txt",
    )
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from quire import __version__

        typer.echo(f"quire {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: bool = typer.Option(False, "--version", help="Print the version.", callback=_print_version, is_eager=True),
) -> None:
    """Serve language models to many people and agents from one paged KV memory. A prefix is computed once for all
    keys that share a cache group."""


def _hint(error: QuireError) -> str:
    """Errors contain their own advice; a failed model lookup also gets a hint to the list of models."""
    return "\n\nhint: quire models lists what is on this machine" if isinstance(error, CheckpointError) else ""


def main() -> None:
    """The `quire` command."""
    try:
        app()
    except QuireError as error:
        typer.echo(f"error: {error}{_hint(error)}", err=True)
        code = 2
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0
    leave_background(code)
    sys.exit(code)
