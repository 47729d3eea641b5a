"""`quire run`: download, serve and chat with a model in one command."""

import os
import sys
from typing import Annotated

import typer

from quire.cli.shared.settings_flags import with_all_settings
from quire.config import Settings
from quire.errors import ConfigError

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
ANY_ADDRESS = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}  # noqa: S104


@with_all_settings
def run(
    settings: Settings,
    model: Annotated[str, typer.Argument(help="A directory, a .gguf file or a hub id.", metavar="MODEL")],
    browser: Annotated[bool, typer.Option("--browser/--no-browser", help="Open the page when it is ready.")] = True,
    chat: Annotated[bool, typer.Option("--chat", help="Chat in this terminal instead of serving.")] = False,
) -> None:
    """Fetch a model if it is not on this machine, serve it and open its chat page."""
    from quire.cli.models.pull import pulled

    path = str(pulled(model, memory_bytes=settings.model.memory_bytes))
    if chat:
        talk(path, settings)
        return
    from quire.cli.serve.serve import all_served, serve_models
    from quire.cli.shared.found_servers import serving_at

    if (there := serving_at(settings.server.port, path)) is not None:
        typer.echo(f"{name_for(model)} is already served at {there.url}; use --port to serve it again", err=True)
        if browser:
            show_page(there.url)
        return
    settings.server.check_keys_file()
    serve_models(all_served([path], [name_for(model)], settings), settings, on_ready=show_page if browser else None)


def name_for(model: str) -> str:
    """Model name for clients: a repository's name without its owner, a file's without its suffix."""
    name = os.path.basename(os.path.normpath(model))
    return name.removesuffix(".gguf") or model


def talk(path: str, settings: Settings) -> None:
    """Chat in the terminal."""
    from quire.cli.chat.chat import ChatSession, talk_in_terminal
    from quire.cli.chat.open_model import opened
    from quire.client.request.params import SamplingParams

    with opened(path, settings) as llm:
        if llm.text.template is None:
            missing = "this model has no chat template; use quire generate, or a chat model"
            raise ConfigError(missing, code="template_missing")
        talk_in_terminal(ChatSession(llm, SamplingParams(max_tokens=None), None))


def show_page(url: str) -> None:
    """Open the page in a browser if there is a display: otherwise a text browser might take over the terminal."""
    if not has_screen():
        return
    import webbrowser

    for anywhere, here in ANY_ADDRESS.items():
        url = url.replace(f"//{anywhere}:", f"//{here}:")
    webbrowser.open(url + "/")


def has_screen() -> bool:
    """Whether there is a display for a browser."""
    return sys.platform == "darwin" or any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY"))
