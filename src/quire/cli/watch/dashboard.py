"""`quire dashboard`: opens the browser at the dashboard of a server. Its address goes to stdout with `--no-browser`."""

from contextlib import suppress
from typing import Annotated

import typer

EPILOG = """\
\b
For a server of yours on this machine the page is served on a loopback port,
before its admin socket: it needs no key, and is there until Ctrl-C. Of any other
server its own page is opened, which asks for an admin key if the server has keys
(quire keys add NAME --admin).
\b
Examples:
  quire dashboard
  quire dashboard --server https://models.example
  quire dashboard --no-browser --port 8123
"""


def dashboard(
    server: Annotated[
        str | None, typer.Option("--server", "--url", help="The server to look at; default: yours on this machine.")
    ] = None,
    browser: Annotated[
        bool, typer.Option("--browser/--no-browser", help="Open it, or print its address on stdout.")
    ] = True,
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="The loopback port of the page; 0: any that is free.")
    ] = 0,
) -> None:
    """Look at a server in the browser: its memory block by block, its steps, who runs and who waits."""
    from quire.cli.watch.watch_source import chosen_source

    source = chosen_source(server, None)
    if source.socket_path is None:
        url = f"{source.url}/dashboard"
        show(url, url, browser=browser)
        return
    from quire.cli.shared.ending import ending
    from quire.cli.watch.dashboard_server import DashboardServer

    with ending(), DashboardServer(source, port) as serving:
        show(serving.url, serving.opening_url, browser=browser)
        with suppress(KeyboardInterrupt):  # that is how it is ended
            serving.serve_forever()


def show(url: str, opening_url: str, *, browser: bool) -> None:
    """To a browser, or to whoever asked for the address."""
    if not browser:
        typer.echo(url)
        return
    from quire.cli.serve.run import has_screen

    typer.echo(f"the dashboard is at {url}\nCtrl-C ends it", err=True)
    if has_screen():
        import webbrowser

        webbrowser.open(opening_url)
