"""`quire top`: watch a server in a terminal. Metrics go to stdout, messages to stderr.

watch stream ─► TopWatcher (a thread) ─► TopFigures ─► picture (lines) ─► the terminal
                                                    └► periodic lines, if stdout is not a terminal
"""

import json
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated

import typer

from quire.errors import ConfigError

if TYPE_CHECKING:
    from quire.cli.watch.top_figures import TopFigures

EPILOG = """\
\b
A server of yours on this machine is found by its admin socket and needs no key;
any other server needs an admin key (quire keys add NAME --admin).
\b
Examples:
  quire top
  quire top --server https://models.example --key KEY
  quire top --once --json
  quire top --every 30 >> figures.log
"""


def top(
    server: Annotated[
        str | None, typer.Option("--server", "--url", help="URL of the server; default: yours on this machine.")
    ] = None,
    key: Annotated[
        str | None, typer.Option(envvar="QUIRE_ADMIN_KEY", help="An admin key of that server.", show_envvar=True)
    ] = None,
    model: Annotated[str | None, typer.Option(help="Model to show; default: the first.")] = None,
    once: Annotated[bool, typer.Option("--once", help="Print one picture and exit.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="With --once: print one JSON object, for scripts.")] = False,
    every: Annotated[
        float, typer.Option(min=0.5, max=3600, help="Seconds between lines, if stdout is not a terminal.")
    ] = 5.0,
) -> None:
    """Watch a server in the terminal: models, speed, memory, running and waiting requests, reasons for misses."""
    from quire.cli.watch.watch_source import chosen_source

    if as_json and not once:
        raise ConfigError("expected --once with --json; pass both", code="json_without_once")
    source = chosen_source(server, key)
    if once:
        from quire.cli.watch.top_watcher import seen_once

        _print_once(seen_once(source, model), as_json=as_json)
        return
    from rich.console import Console

    from quire.cli.shared.ending import ending
    from quire.cli.watch.top_terminal import show_in_terminal, write_lines
    from quire.cli.watch.top_watcher import TopWatcher

    console = Console()
    with ending(), TopWatcher(source, model) as watcher, suppress(KeyboardInterrupt):  # Ctrl-C quits
        if console.is_terminal:
            show_in_terminal(watcher, console)
        else:
            write_lines(watcher, every)


def _print_once(figures: "TopFigures", *, as_json: bool) -> None:
    from rich.console import Console

    from quire.cli.watch.top_figures import essentials
    from quire.cli.watch.top_terminal import print_picture

    if as_json:
        typer.echo(json.dumps(essentials(figures), ensure_ascii=False))
        return
    print_picture(figures, Console(highlight=False))
