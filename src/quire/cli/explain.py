"""`quire explain`: why the next token of a prompt would not be found in a server's cache. The answer goes to stdout."""

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from quire.errors import ConfigError

EPILOG = "\b\nExamples:\n  quire explain body.json\n  quire explain prompt.txt --server http://127.0.0.1:8000 --json"


def explain(
    file: Annotated[
        str, typer.Argument(help="A chat or completion body as JSON, saved messages, or plain text; - reads stdin.")
    ],
    server: Annotated[str, typer.Option("--server", "--url", help="The server to ask.")] = "http://127.0.0.1:8000",
    model: Annotated[str | None, typer.Option(help="Its name there; default: the body's own, or the only one.")] = None,
    key: Annotated[
        str | None, typer.Option(envvar="OPENAI_API_KEY", help="The server's API key.", show_envvar=True)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the server's answer instead of sentences.")] = False,
) -> None:
    """Say how much of a prompt is cached, and why the next token is not. Nothing is computed."""
    from quire.cli.remote import Remote

    body = body_of(_read(file)) | ({} if model is None else {"model": model})
    told = Remote.unlisted(server, key).explain(body)
    typer.echo(json.dumps(told, ensure_ascii=False, indent=2) if as_json else page(told))


def _read(name: str) -> str:
    try:
        data = sys.stdin.buffer.read() if name == "-" else Path(name).expanduser().read_bytes()
        return data.decode()
    except OSError as error:
        raise ConfigError(f"the prompt must be a file that can be read: {error}; - reads stdin") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"the prompt must be text in UTF-8, {name} is not: {error}") from error


def body_of(text: str) -> dict[str, Any]:
    """The body to ask with: a JSON object with a prompt or messages as it is, a list of messages, else a prompt."""
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if isinstance(found, dict) and ("messages" in found or "prompt" in found):
        return found
    if isinstance(found, list) and found and all(isinstance(one, dict) and "role" in one for one in found):
        return {"messages": found}
    return {"prompt": text}


def page(told: dict[str, Any]) -> str:
    """The answer as a person reads it."""
    lines = [
        f"{told['cached_tokens']} of {told['prompt_tokens']} tokens are cached",
        f"{told['reason']}: {told['explanation']}",
    ]
    if (found := told["difference"]) is not None:
        ours, theirs = found["token"], found["cached_token"]
        lines += [
            f"it is {ours!r} ({found['token_id']}), cached is {theirs!r} ({found['cached_token_id']})",
            "",
            f"  prompt  {_marked(found['before'], ours, found['after'])}",
            f"  cached  {_marked(found['before'], theirs, found['cached_after'])}",
        ]
    return "\n".join(lines)


def _marked(before: str, token: str, text: str) -> str:
    """A text that begins with the token, after what stands before it, with the token in brackets."""
    return f"{_shown(before)}[{_shown(token)}]{_shown(text.removeprefix(token))}"


def _shown(text: str) -> str:
    """On one line, with nothing in it that a terminal would obey."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)
