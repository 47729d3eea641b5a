"""`quire explain`: print how much of a prompt a server has cached, and why its first uncached token is a miss."""

import json
import os
import sys
from pathlib import Path
from shutil import get_terminal_size
from typing import Annotated, Any
from urllib.parse import quote

import typer

from quire.errors import ConfigError

EPILOG = (
    "\b\nExamples:\n  quire explain body.json\n  quire explain prompt.txt --server http://127.0.0.1:8000 --json"
    "\n  quire explain --request req-0123456789abcdef"
)


def explain(
    file: Annotated[
        str | None,
        typer.Argument(help="A chat or completion request as JSON, saved messages, or plain text; - reads stdin."),
    ] = None,
    request: Annotated[
        str | None,
        typer.Option(metavar="ID", help="A request that ran: the x-request-id or the id of its response."),
    ] = None,
    server: Annotated[str, typer.Option("--server", "--url", help="URL of the server.")] = "http://127.0.0.1:8000",
    model: Annotated[str | None, typer.Option(help="Model; default: the one in the request, or the only one.")] = None,
    key: Annotated[
        str | None, typer.Option(envvar="OPENAI_API_KEY", help="The server's API key.", show_envvar=True)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the server's response instead of text.")] = False,
) -> None:
    """Show how much of a prompt is cached and why the next token is not, for a file or a request that ran. Nothing is
    computed."""
    from quire.cli.chat.explain_page import explanation_page, request_page
    from quire.cli.chat.remote import fetch_json, server_at

    if (file is None) == (request is None):
        raise ConfigError("expected either a file or --request; quire explain --help shows both")
    address = server_at(server, key)
    if request is not None:
        response, page = fetch_json(address, "GET", f"/v1/requests/{quote(request, safe='')}/cache"), request_page
    else:
        body = body_of(_read(file or "-")) | ({} if model is None else {"model": model})
        response, page = fetch_json(address, "POST", "/v1/cache/explain", body), explanation_page
    if as_json:
        typer.echo(json.dumps(response, ensure_ascii=False, indent=2))
    else:
        typer.echo(page(response, get_terminal_size((100, 24)).columns, _colour))


def _colour(text: str, colour: str) -> str:
    """Colour a text; typer removes colours if stdout is not a terminal."""
    return text if os.environ.get("NO_COLOR") else typer.style(text, fg=colour, bold=True)


def _read(name: str) -> str:
    try:
        data = sys.stdin.buffer.read() if name == "-" else Path(name).expanduser().read_bytes()
        return data.decode()
    except OSError as error:
        raise ConfigError(f"cannot read the prompt: {error}; - reads stdin", code="file_not_readable") from error
    except UnicodeDecodeError as error:
        message = f"expected a prompt in UTF-8, got other bytes from {name}: {error}"
        raise ConfigError(message, code="prompt_not_utf8") from error


def body_of(text: str) -> dict[str, Any]:
    """Build the request body from a JSON object with a prompt or messages, a list of messages, or a plain prompt."""
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if isinstance(value, dict) and ("messages" in value or "prompt" in value):
        return value
    if isinstance(value, list) and value and all(isinstance(item, dict) and "role" in item for item in value):
        return {"messages": value}
    return {"prompt": text}
