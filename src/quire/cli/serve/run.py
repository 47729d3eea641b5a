"""`quire run`: download, serve and chat with a model in one command."""

import os
import sys
from dataclasses import replace
from typing import Annotated

import typer

from quire.cli.shared.flags import with_all_settings
from quire.config import Settings

EPILOG = """\
\b
Without a quantisation the best file of a repository that fits the memory is chosen; a table shows why.
A model that is already served on that port is not served twice: its page is opened.
\b
Examples:
  quire run org/name
  quire run org/name:Q4_K_M --chat
  quire run model.gguf --no-browser
"""
LOOPBACK = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - keys are addresses that servers listen on


@with_all_settings
def run(
    settings: Settings,
    model: Annotated[str, typer.Argument(help="A directory, a .gguf file or a hub id.", metavar="MODEL")],
    browser: Annotated[bool, typer.Option("--browser/--no-browser", help="Open the page when it is ready.")] = True,
    chat: Annotated[bool, typer.Option("--chat", help="Chat in this terminal instead of serving.")] = False,
) -> None:
    """Fetch a model if it is not on this machine, serve it and open its chat page."""
    from quire.cli.models.pull import fetch_model

    path = str(fetch_model(model, memory_bytes=settings.model.memory_bytes))
    if chat:
        from quire.cli.chat.chat import chat_with
        from quire.client.request.params import SamplingParams

        chat_with(path, settings, SamplingParams(max_tokens=None))
        return
    from quire.cli.serve.serve import collect_models, serve_models
    from quire.cli.shared.found_servers import server_on_port

    if (server := server_on_port(settings.server.port, path)) is not None:
        typer.echo(f"{name_for(model)} is already served at {server.url}; use --port to serve it again", err=True)
        if browser:
            show_page(server.url)
        return
    settings.server.check_keys_file()
    serve_models(collect_models([path], [name_for(model)], settings), settings, on_ready=show_page if browser else None)


def name_for(model: str) -> str:
    """Return the model name for clients: a repository's name without its owner, a file's name without `.gguf`."""
    name = os.path.basename(os.path.normpath(model))
    return name.removesuffix(".gguf") or model


def browser_url(url: str, port: int = 0) -> str:
    """Return the URL of the server for a browser on this machine, or through a tunnel from local port `port`."""
    from quire.http_client import ServerAddress

    server = ServerAddress.parse(url)
    if port:
        return replace(server, host="127.0.0.1", port=port).url
    return replace(server, host=LOOPBACK.get(server.host, server.host)).url


def show_page(url: str) -> None:
    """Open a server's chat page in a browser."""
    open_in_browser(browser_url(url) + "/")


def open_in_browser(url: str) -> None:
    """Open the URL in a browser if there is a display; without a display, a text browser might occupy the terminal."""
    if sys.platform == "darwin" or any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY")):
        import webbrowser

        webbrowser.open(url)
