"""The flags with which a trace is replayed: one table, of which a command's options are made."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer


def _flag(default: Any, help_text: str, **limits: Any) -> Any:
    return field(default=default, metadata={"help": f"With a trace: {help_text}", "limits": limits})


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceFlags:
    """A fleet and what of a trace it gets, as said on the command line."""

    members: int = _flag(1, "servers of the fleet.", min=1, max=1000)
    gateways: int = _flag(1, "gateways before them.", min=1, max=64)
    policy: str = _flag("cost", "how gateways choose.")
    pool: int = _flag(3000, "KV blocks of a member.", min=2)
    block_size: int = _flag(512, "tokens of a block.", min=1)
    step_tokens: int = _flag(8192, "tokens a step may feed.", min=1)
    running: int = _flag(256, "sequences that may run at once.", min=1)
    speedup: float = _flag(1.0, "how many times as fast it comes.", min=1e-6)
    share: float = _flag(1.0, "share of its conversations.", min=0.0, max=1.0)
    tenants: int = _flag(1, "tenants, by conversation.", min=1)
    classes: str = _flag("", "classes, such as high=0.1,low=0.3.")
    profile: str = _flag(
        "prompt=16000,answer=100",
        "how long steps take: a file of `quire bench engine --profile`, or numbers by hand.",
    )
    report_age: float | None = _flag(
        None, "seconds that load reports are old; default 0, with several gateways 0.25.", min=0.0, max=3600.0
    )
    faults: str = _flag("", "what goes wrong, such as deaths=2,drains=1,clears=1,joins=2,lost=0.01.")
    detect_delay: float = _flag(0.0, "seconds until a death is noticed.", min=0.0, max=3600.0)
    save: Path | None = _flag(None, "write what is replayed to this file, in quire's own format, and stop.")  # noqa: RUF009 - a field


def with_trace_flags(command: Callable[..., None]) -> Callable[..., None]:
    """The command with all of these as options behind its own; its first parameter gets the `TraceFlags`."""
    hints = get_type_hints(TraceFlags)
    flags = [_parameter(one.name, hints[one.name], one.default, one.metadata) for one in fields(TraceFlags)]
    parameters = [*list(inspect.signature(command, eval_str=True).parameters.values())[1:], *flags]

    def with_flags(**given: Any) -> None:
        flags_given = {flag.name: given.pop(flag.name) for flag in flags}
        command(TraceFlags(**flags_given), **given)

    with_flags.__name__, with_flags.__doc__ = command.__name__, command.__doc__
    with_flags.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    with_flags.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return with_flags


def _parameter(name: str, kind: Any, default: Any, metadata: Any) -> inspect.Parameter:
    option = typer.Option(f"--{name.replace('_', '-')}", help=metadata["help"], **metadata["limits"])
    return inspect.Parameter(
        name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default, annotation=Annotated[kind, option]
    )
