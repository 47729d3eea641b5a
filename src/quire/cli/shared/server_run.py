"""Code shared by `quire serve`, its replicas and a gateway: messages, logs, and running until shutdown."""

from collections.abc import Coroutine
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from quire.config import Settings


def print_line(line: str) -> None:
    """Print a message for the operator to stderr."""
    typer.echo(line, err=True)


def prepare_server(settings: "Settings") -> None:
    """Set up the log and raise the limit of open files, for many connections."""
    from quire.api.http.acceptor import allow_many_connections
    from quire.observe.access_log import configure_logging

    configure_logging(settings.server.log_format)
    if (warning := allow_many_connections()) is not None:
        print_line(warning)


def run_until_shutdown(serving: Coroutine[Any, Any, int]) -> None:
    """Run a server coroutine, which returns the number of requests cancelled at shutdown."""
    import asyncio

    import uvloop

    num_cancelled = 0
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner, suppress(asyncio.CancelledError):
        num_cancelled = runner.run(serving)  # CancelledError: shutdown before serving began
    if num_cancelled:
        print_line(f"{num_cancelled} requests did not finish in time and were cancelled")
