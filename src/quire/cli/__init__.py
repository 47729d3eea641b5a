"""What a person types. Commands parse, call and print; each imports what it needs when it runs, so `--help` is quick.

Data goes to stdout, talk to stderr. An error of ours is one line and a hint, never a traceback.
"""

import sys

import typer

from quire.cli.sim import sim
from quire.errors import QuireError

app = typer.Typer(
    name="quire",
    help="Serve language models to many people and agents from one paged KV memory.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.command(epilog="Example: quire sim --scenario agents --seed 7")(sim)


def _print_version(wanted: bool) -> None:
    if wanted:
        from quire import __version__

        typer.echo(f"quire {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: bool = typer.Option(False, "--version", help="Print the version.", callback=_print_version, is_eager=True),
) -> None:
    """Serve language models to many people and agents from one paged KV memory."""


def main() -> None:
    """The `quire` command."""
    try:
        app()
    except QuireError as error:
        typer.echo(f"error: {error}\n\nhint: quire --help", err=True)
        sys.exit(2)
