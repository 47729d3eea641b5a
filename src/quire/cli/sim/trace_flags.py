"""The flags with which a trace meets a fleet: tables, of which commands' options are made."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from quire.errors import ConfigError

if TYPE_CHECKING:
    from quire.sim.fleet.member import MemberSize

REPORT_AGE_S = 0.25
"""Of load reports, where several gateways need them."""


def _flag(default: Any, help_text: str, **limits: Any) -> Any:
    return field(default=default, metadata={"help": help_text, "limits": limits})


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetFlags:
    """What is said of the trace and of the members, but not how many there are."""

    gateways: int = _flag(1, "gateways before the members.", min=1, max=64)
    policy: str = _flag("cost", "how gateways choose.")
    pool: int = _flag(3000, "KV blocks of a member.", min=2)
    block_size: int = _flag(512, "tokens of a block.", min=1)
    step_tokens: int = _flag(8192, "tokens a step may feed.", min=1)
    step_ms: int = _flag(0, "milliseconds a step that reads prompts may last; 0: as long as step-tokens take.", min=0)
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

    @property
    def report_age_s(self) -> float:
        """As said, or what fits the gateways."""
        if self.report_age is not None:
            return self.report_age
        return 0.0 if self.gateways == 1 else REPORT_AGE_S

    def member_size(self) -> "MemberSize":
        """Of each member."""
        from quire.sim.fleet.member import MemberSize

        sizes = self.pool, self.block_size, self.step_tokens, self.running
        return MemberSize(*sizes, step_limit_s=self.step_ms / 1000)

    def check_policy(self) -> None:
        """Raise ConfigError for a policy that nobody knows."""
        from quire.sim.fleet.policies import POLICIES

        if self.policy not in POLICIES:
            raise ConfigError(f"policy must be one of {', '.join(POLICIES)}, {self.policy!r} given")


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceFlags(FleetFlags):
    """A whole fleet, and what goes wrong in it."""

    members: int = _flag(1, "servers of the fleet.", min=1, max=1000)
    faults: str = _flag("", "what goes wrong, such as deaths=2,drains=1,clears=1,joins=2,lost=0.01.")
    detect_delay: float = _flag(0.0, "seconds until a death is noticed.", min=0.0, max=3600.0)
    save: Path | None = _flag(None, "write what is replayed to this file, in quire's own format, and stop.")  # noqa: RUF009 - a field


def with_flags_of(kind: type[FleetFlags], lead: str = "") -> Callable[[Callable[..., None]], Callable[..., None]]:
    """The command with all of these as options behind its own; its first parameter gets them. `lead` stands before
    their help."""

    def decorated(command: Callable[..., None]) -> Callable[..., None]:
        hints = get_type_hints(kind)
        flags = [_parameter(one.name, hints[one.name], one.default, one.metadata, lead) for one in fields(kind)]
        parameters = [*list(inspect.signature(command, eval_str=True).parameters.values())[1:], *flags]

        def with_flags(**given: Any) -> None:
            flags_given = {flag.name: given.pop(flag.name) for flag in flags}
            command(kind(**flags_given), **given)

        with_flags.__name__, with_flags.__doc__ = command.__name__, command.__doc__
        with_flags.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        with_flags.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return with_flags

    return decorated


def _parameter(name: str, kind: Any, default: Any, metadata: Any, lead: str) -> inspect.Parameter:
    told = metadata["help"]
    text = f"{lead}{told}" if lead else told[0].upper() + told[1:]
    option = typer.Option(f"--{name.replace('_', '-')}", help=text, **metadata["limits"])
    return inspect.Parameter(
        name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default, annotation=Annotated[kind, option]
    )
