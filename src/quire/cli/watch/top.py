"""`quire top`: watch a server in a terminal. Metrics go to stdout, messages to stderr.

watch stream ─► TopWatcher (a thread) ─► TopMetrics ─► screen lines ─► the terminal
                                                    └► periodic lines, if stdout is not a terminal
"""

import json
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated

import typer

from quire.errors import ConfigError

if TYPE_CHECKING:
    from quire.cli.watch.top_figures import TopMetrics

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
    once: Annotated[bool, typer.Option("--once", help="Print one screen and exit.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="With --once: print one JSON object, for scripts.")] = False,
    every: Annotated[
        float, typer.Option(min=0.5, max=3600, help="Seconds between lines, if stdout is not a terminal.")
    ] = 5.0,
) -> None:
    """Watch a server in the terminal: models, speed, memory, running and waiting requests, reasons for misses."""
    from quire.cli.watch.watch_source import choose_source

    if as_json and not once:
        raise ConfigError("expected --once with --json; pass both", code="json_without_once")
    source = choose_source(server, key)
    if once:
        from quire.cli.watch.top_watcher import fetch_once

        _print_once(fetch_once(source, model), as_json=as_json)
        return
    from rich.console import Console

    from quire.cli.shared.ending import exit_on_signals
    from quire.cli.watch.top_terminal import show_in_terminal, write_lines
    from quire.cli.watch.top_watcher import TopWatcher

    console = Console()
    with exit_on_signals(), TopWatcher(source, model) as watcher, suppress(KeyboardInterrupt):  # Ctrl-C quits
        if console.is_terminal:
            show_in_terminal(watcher, console)
        else:
            write_lines(watcher, every)


def _print_once(metrics: "TopMetrics", *, as_json: bool) -> None:
    from rich.console import Console

    from quire.cli.watch.top_figures import json_fields
    from quire.cli.watch.top_terminal import print_screen

    if as_json:
        typer.echo(json.dumps(json_fields(metrics), ensure_ascii=False))
        return
    print_screen(metrics, Console(highlight=False))
