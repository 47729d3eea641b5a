"""`quire dashboard`: open a server's dashboard in a browser, or with `--no-browser` print its address."""

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
    from quire.cli.serve.run import browser_url, open_in_browser
    from quire.cli.watch.watch_source import choose_source

    source = choose_source(server, None)
    url = f"{source.url}/dashboard"
    if source.socket_path is not None:
        url = f"{browser_url(source.url, port)}/dashboard#token={_token(source.socket_path)}"
    if not browser:
        typer.echo(url)
        return
    typer.echo(f"the dashboard is at {url}", err=True)
    open_in_browser(url)


def _token(socket_path: Path) -> str:
    """Request a token for one page from the admin socket. Raises ConfigError if the server returns none."""
    from quire.cli.shared.found_servers import admin_request

    try:
        return str(admin_request(socket_path, "POST", "/dashboard")["token"])
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"the server returned no token for its dashboard: {error}; update it, or use quire top", code="no_dashboard"
        ) from error
