"""Gives a bench command a flag for every setting of the load, and for how to reach and ask a server."""

import inspect
from collections.abc import Callable
from dataclasses import MISSING, fields
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from quire.bench.setup import LoadSetup

if TYPE_CHECKING:
    from quire.bench.http_client import ServerAddress
    from quire.bench.runs import Wishes

KEY_VARIABLES = ("OPENAI_API_KEY",)
PAIR = "NAME=VALUE"
EXTRA_HELP = "Laid over every body; null takes a field away."
GOODPUT_HELP = "Limit to keep: ttft:500, tpot:50, e2el:9000; may be repeated."
EOS_HELP = "Ask for every token, also after the model's own end token."


def with_load(command: Callable[..., None]) -> Callable[..., None]:
    """The command with all of a load as flags; its first parameter gets the `LoadSetup`."""
    own = list(inspect.signature(command, eval_str=True).parameters.values())[1:]
    hints = get_type_hints(LoadSetup)
    flags = [_parameter(one.name, hints[one.name], one.default, one.metadata) for one in fields(LoadSetup)]
    parameters = [*own, *flags]

    def with_flags(**given: Any) -> None:
        load = {flag.name: given.pop(flag.name) for flag in flags}
        command(LoadSetup(**load), **given)

    with_flags.__name__, with_flags.__doc__ = command.__name__, command.__doc__
    with_flags.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    with_flags.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return with_flags


def with_asking(command: Callable[..., None]) -> Callable[..., None]:
    """The command with the flags of how to ask; its parameter `asking` gets them as an `Asking`."""
    own = [one for one in inspect.signature(command).parameters.values() if one.name != "asking"]
    parameters = [*own, *_ASKING]

    def with_flags(**given: Any) -> None:
        asking = Asking({one.name: given.pop(one.name) for one in _ASKING})
        command(asking=asking, **given)

    with_flags.__name__, with_flags.__doc__ = command.__name__, command.__doc__
    with_flags.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    with_flags.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return with_flags


class Asking:
    """What was said of how to ask: a server for a URL, and wishes."""

    def __init__(self, given: dict[str, Any]) -> None:
        self._given = given

    def server(self, url: str) -> "ServerAddress":
        """The server at that address."""
        from quire.errors import ConfigError

        try:
            from quire.bench.http_client import ServerAddress
        except ImportError as error:
            raise ConfigError(
                "asking a server needs aiohttp, which is missing; pip install 'aiohttp>=3.13,<4'"
            ) from error
        given = self._given
        return ServerAddress(url, given["api_key"], _pairs(given["header"], "--header"), given["timeout"])

    def wishes(self) -> "Wishes":
        """How to measure."""
        from quire.bench.measures import Objective
        from quire.bench.runs import Wishes

        given = self._given
        return Wishes(
            model=given["model"],
            ready_s=given["ready_timeout"],
            num_warmups=given["warmups"],
            ignores_eos=given["ignore_eos"],
            sends_priority=given["send_priority"],
            extra=_json(given["extra_body"]),
            label=given["label"],
            objective=Objective.parse([word for text in given["goodput"] or () for word in text.split()]),
            metadata=_pairs(given["metadata"], "--metadata"),
        )


def _parameter(name: str, kind: Any, default: Any, metadata: Any) -> inspect.Parameter:
    names = metadata["names"] or (f"--{name.replace('_', '-')}",)
    option = typer.Option(*names, help=metadata["help"], show_default=default not in (None, ""))
    annotation = Annotated[kind, option]
    if default is MISSING:
        raise TypeError(f"{name} needs a default")
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _asking(name: str, kind: Any, default: Any, option: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option])


_ASKING = (
    _asking("model", str | None, None, typer.Option(help="Model to ask for; default: the first the server lists.")),
    _asking(
        "api_key",
        str | None,
        None,
        typer.Option("--api-key", "--key", help="Key for the server.", envvar=list(KEY_VARIABLES), show_envvar=True),
    ),
    _asking("header", list[str] | None, None, typer.Option(metavar=PAIR, help="Header to send; repeatable.")),
    _asking("timeout", float, 600.0, typer.Option(help="Longest time for one answer, in seconds.")),
    _asking("ready_timeout", float, 30.0, typer.Option(help="Wait so many seconds for the server to answer.")),
    _asking("warmups", int, 1, typer.Option("--warmups", "--num-warmups", min=0, help="Requests before the clock.")),
    _asking("ignore_eos", bool, True, typer.Option(help=EOS_HELP)),
    _asking("send_priority", bool, False, typer.Option("--send-priority", help="Send each class as a priority.")),
    _asking(
        "extra_body",
        str | None,
        None,
        typer.Option(metavar="JSON", help=EXTRA_HELP),
    ),
    _asking(
        "goodput",
        list[str] | None,
        None,
        typer.Option(metavar="NAME:MS", help=GOODPUT_HELP),
    ),
    _asking("label", str | None, None, typer.Option(help="A name for the result.")),
    _asking(
        "metadata",
        list[str] | None,
        None,
        typer.Option(metavar=PAIR, help="Put into the result; repeatable."),
    ),
)


def _pairs(words: list[str] | None, flag: str) -> dict[str, str]:
    from quire.errors import ConfigError

    pairs = {}
    for word in words or ():
        name, equals, value = word.partition("=")
        if not equals or not name:
            raise ConfigError(f"{flag} takes name=value, {word!r} given")
        pairs[name.strip()] = value.strip()
    return pairs


def _json(text: str | None) -> dict[str, Any]:
    import json

    from quire.errors import ConfigError

    if text is None:
        return {}
    try:
        fields_given = json.loads(text)
    except ValueError:
        fields_given = None
    if not isinstance(fields_given, dict):
        raise ConfigError(f"--extra-body takes a JSON object, {text!r} given")
    return fields_given
