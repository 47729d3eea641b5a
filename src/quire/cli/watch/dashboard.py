"""`quire dashboard`: open a server's dashboard in a browser, or print its address with `--no-browser`."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from quire.errors import ConfigError

EPILOG = """\
\b
A server of yours on this machine needs no key: the page gets a token from its
admin socket, which works once, within 60 s. For any other server its own page is
opened, which requires an admin key if the server has keys (quire keys add NAME
--admin).
\b
Examples:
  quire dashboard
  quire dashboard --server https://models.example
  ssh -L 8123:127.0.0.1:8000 machine quire dashboard --no-browser --port 8123
"""
LOOPBACK = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - where a server that listens on all addresses is reached


def dashboard(
    server: Annotated[
        str | None, typer.Option("--server", "--url", help="URL of the server; default: yours on this machine.")
    ] = None,
    browser: Annotated[
        bool, typer.Option("--browser/--no-browser", help="Open the page, or print its address on stdout.")
    ] = True,
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Local port of a tunnel to the server; 0: there is none.")
    ] = 0,
) -> None:
    """Show a server in the browser: its memory block by block, its steps, running and waiting requests."""
    from quire.cli.watch.watch_source import chosen_source

    source = chosen_source(server, None)
    url = f"{source.url}/dashboard"
    if source.socket_path is not None:
        url = f"{_reached(source.url, port)}/dashboard#token={_token(source.socket_path)}"
    if not browser:
        typer.echo(url)
        return
    from quire.cli.serve.run import has_screen

    typer.echo(f"the dashboard is at {url}", err=True)
    if has_screen():
        import webbrowser

        webbrowser.open(url)


def _reached(url: str, port: int) -> str:
    """Where a browser on this machine, or at the other end of a tunnel, reaches the server."""
    from quire.http_client import HttpServer

    server = HttpServer.at(url)
    if port:
        return replace(server, host="127.0.0.1", port=port).url
    return replace(server, host=LOOPBACK.get(server.host, server.host)).url


def _token(socket_path: Path) -> str:
    """A token for one page."""
    from quire.cli.shared.found_servers import admin_request

    try:
        return str(admin_request(socket_path, "POST", "/dashboard")["token"])
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"the server gave no token for its dashboard: {error}; update it, or use quire top"
        ) from error
