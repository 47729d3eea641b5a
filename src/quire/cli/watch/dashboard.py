"""`quire dashboard`: open a server's dashboard in a browser, or print its address with `--no-browser`."""

from contextlib import suppress
from typing import Annotated

import typer

EPILOG = """\
\b
For a server of yours on this machine the page is served on a loopback port, in
front of its admin socket: it needs no key, and is served until Ctrl-C. For any
other server its own page is opened, which requires an admin key if the server has
keys (quire keys add NAME --admin).
\b
Examples:
  quire dashboard
  quire dashboard --server https://models.example
  quire dashboard --no-browser --port 8123
"""


def dashboard(
    server: Annotated[
        str | None, typer.Option("--server", "--url", help="URL of the server; default: yours on this machine.")
    ] = None,
    browser: Annotated[
        bool, typer.Option("--browser/--no-browser", help="Open the page, or print its address on stdout.")
    ] = True,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Loopback port of the page; 0: any free port.")] = 0,
) -> None:
    """Show a server in the browser: its memory block by block, its steps, running and waiting requests."""
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
        with suppress(KeyboardInterrupt):  # Ctrl-C ends it
            serving.serve_forever()


def show(url: str, opening_url: str, *, browser: bool) -> None:
    """Open the page in a browser, or print its address."""
    if not browser:
        typer.echo(url)
        return
    from quire.cli.serve.run import has_screen

    typer.echo(f"the dashboard is at {url}\nCtrl-C stops it", err=True)
    if has_screen():
        import webbrowser

        webbrowser.open(opening_url)
