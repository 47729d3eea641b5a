"""Adds flags to a bench command: every setting of the load, and how to reach and measure a server."""

import inspect
from collections.abc import Callable
from dataclasses import MISSING, fields
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from quire.bench.setup import LoadSetup

if TYPE_CHECKING:
    from quire.bench.http_client import ServerAddress
    from quire.bench.runs import BenchOptions

KEY_VARIABLES = ("OPENAI_API_KEY",)
PAIR = "NAME=VALUE"
EXTRA_HELP = "Merged into every request body; null removes a field."
GOODPUT_HELP = "Latency limit: ttft:500, tpot:50, e2el:9000; repeatable."
EOS_HELP = "Request all output tokens, even after the model's end token."


def with_load(command: Callable[..., None]) -> Callable[..., None]:
    """The command with all of a load as flags; its first parameter gets the `LoadSetup`."""
    own = list(inspect.signature(command, eval_str=True).parameters.values())[1:]
    hints = get_type_hints(LoadSetup)
    flags = [_parameter(one.name, hints[one.name], one.default, one.metadata) for one in fields(LoadSetup)]
    parameters = [*own, *flags]

    def with_flags(**arguments: Any) -> None:
        load = {flag.name: arguments.pop(flag.name) for flag in flags}
        command(LoadSetup(**load), **arguments)

    with_flags.__name__, with_flags.__doc__ = command.__name__, command.__doc__
    with_flags.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    with_flags.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return with_flags


def with_server_flags(command: Callable[..., None]) -> Callable[..., None]:
    """The command with the flags of the server; its parameter `server_flags` gets a `ServerFlags`."""
    own = [one for one in inspect.signature(command).parameters.values() if one.name != "server_flags"]
    parameters = [*own, *_SERVER_FLAGS]

    def with_flags(**arguments: Any) -> None:
        server_flags = ServerFlags({one.name: arguments.pop(one.name) for one in _SERVER_FLAGS})
        command(server_flags=server_flags, **arguments)

    with_flags.__name__, with_flags.__doc__ = command.__name__, command.__doc__
    with_flags.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    with_flags.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return with_flags


class ServerFlags:
    """The flags for how to reach and measure a server."""

    def __init__(self, values: dict[str, Any]) -> None:
        self._values = values

    def server(self, url: str) -> "ServerAddress":
        """The server at that address."""
        from quire.bench.http_client import ServerAddress

        values = self._values
        return ServerAddress(url, values["api_key"], _pairs(values["header"], "--header"), values["timeout"])

    def options(self) -> "BenchOptions":
        """Options of the measurement."""
        from quire.bench.measures import Objective
        from quire.bench.runs import BenchOptions

        values = self._values
        return BenchOptions(
            model=values["model"],
            ready_s=values["ready_timeout"],
            num_warmups=values["warmups"],
            ignores_eos=values["ignore_eos"],
            sends_priority=values["send_priority"],
            extra=_json(values["extra_body"]),
            label=values["label"],
            objective=Objective.parse([word for text in values["goodput"] or () for word in text.split()]),
            metadata=_pairs(values["metadata"], "--metadata"),
        )


def _parameter(name: str, kind: Any, default: Any, metadata: Any) -> inspect.Parameter:
    names = metadata["names"] or (f"--{name.replace('_', '-')}",)
    option = typer.Option(*names, help=metadata["help"], show_default=default not in (None, ""))
    annotation = Annotated[kind, option]
    if default is MISSING:
        raise TypeError(f"{name} needs a default")
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _server_flag(name: str, kind: Any, default: Any, option: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option])


_SERVER_FLAGS = (
    _server_flag(
        "model", str | None, None, typer.Option(help="Model to request; default: the first the server lists.")
    ),
    _server_flag(
        "api_key",
        str | None,
        None,
        typer.Option("--api-key", "--key", help="Key for the server.", envvar=list(KEY_VARIABLES), show_envvar=True),
    ),
    _server_flag("header", list[str] | None, None, typer.Option(metavar=PAIR, help="Header to send; repeatable.")),
    _server_flag("timeout", float, 600.0, typer.Option(help="Timeout of one request, in seconds.")),
    _server_flag("ready_timeout", float, 30.0, typer.Option(help="Seconds to wait until the server responds.")),
    _server_flag("warmups", int, 1, typer.Option("--warmups", "--num-warmups", min=0, help="Warm-up requests.")),
    _server_flag("ignore_eos", bool, True, typer.Option(help=EOS_HELP)),
    _server_flag("send_priority", bool, False, typer.Option("--send-priority", help="Send each class as a priority.")),
    _server_flag(
        "extra_body",
        str | None,
        None,
        typer.Option(metavar="JSON", help=EXTRA_HELP),
    ),
    _server_flag(
        "goodput",
        list[str] | None,
        None,
        typer.Option(metavar="NAME:MS", help=GOODPUT_HELP),
    ),
    _server_flag("label", str | None, None, typer.Option(help="A name for the result.")),
    _server_flag(
        "metadata",
        list[str] | None,
        None,
        typer.Option(metavar=PAIR, help="Metadata for the result; repeatable."),
    ),
)


def _pairs(words: list[str] | None, flag: str) -> dict[str, str]:
    from quire.errors import ConfigError

    pairs = {}
    for word in words or ():
        name, equals, value = word.partition("=")
        if not equals or not name:
            raise ConfigError(f"expected name=value for {flag}, got {word!r}", (flag,))
        pairs[name.strip()] = value.strip()
    return pairs


def _json(text: str | None) -> dict[str, Any]:
    import json

    from quire.errors import ConfigError

    if text is None:
        return {}
    try:
        extra = json.loads(text)
    except ValueError:
        extra = None
    if not isinstance(extra, dict):
        raise ConfigError(f"expected a JSON object for --extra-body, got {text!r}", ("--extra-body",))
    return extra
