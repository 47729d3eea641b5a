"""`quire run`: from a model's name to a conversation with it, in one command."""

import os
import sys
from typing import Annotated

import typer

from quire.cli.shared.settings_flags import with_all_settings
from quire.config import Settings
from quire.errors import ConfigError

EPILOG = """\
\b
Of a repository without a quantisation the best file that fits the memory is taken; a table says why.
What is served on that port already is not served twice: its page is opened.
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
    browser: Annotated[bool, typer.Option("--browser/--no-browser", help="Open the page once it is there.")] = True,
    chat: Annotated[bool, typer.Option("--chat", help="Talk in this terminal instead of serving.")] = False,
) -> None:
    """Fetch a model if it is not here, serve it and open the page to talk to it."""
    from quire.cli.models.pull import pulled

    path = str(pulled(model, memory_bytes=settings.model.memory_bytes))
    if chat:
        talk(path, settings)
        return
    from quire.cli.serve.serve import all_served, serve_models
    from quire.cli.shared.found_servers import serving_at

    if (there := serving_at(settings.server.port, path)) is not None:
        typer.echo(f"{name_for(model)} is served already, at {there.url}; --port serves it once more", err=True)
        if browser:
            show_page(there.url)
        return
    settings.server.check_keys_file()
    serve_models(all_served([path], [name_for(model)], settings), settings, on_ready=show_page if browser else None)


def name_for(model: str) -> str:
    """What clients call it: a repository's name without its owner, a file's without its ending."""
    name = os.path.basename(os.path.normpath(model))
    return name.removesuffix(".gguf") or model


def talk(path: str, settings: Settings) -> None:
    """In the terminal."""
    from quire.cli.chat.chat import Talk, talk_in_terminal
    from quire.cli.chat.open_model import opened
    from quire.client.request.params import SamplingParams

    with opened(path, settings) as llm:
        if llm.text.template is None:
            raise ConfigError("this model has no chat template; use quire generate, or a model made for chatting")
        talk_in_terminal(Talk(llm, SamplingParams(max_tokens=None), None))


def show_page(url: str) -> None:
    """In a browser, where there is a screen for one: elsewhere a text browser would take the terminal."""
    if not has_screen():
        return
    import webbrowser

    for anywhere, here in ANY_ADDRESS.items():
        url = url.replace(f"//{anywhere}:", f"//{here}:")
    webbrowser.open(url + "/")


def has_screen() -> bool:
    """Whether a browser would have somewhere to show a page."""
    return sys.platform == "darwin" or any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY"))
