"""Gives a command the flags that change a trace, and those that size and join the members that answer it."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quire.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

    from quire.sim.objectives import LatencyObjective
    from quire.sim.planning import PlanSetup
    from quire.engine.step_profile import StepProfile


@dataclass(frozen=True, slots=True)
class FleetFlags:
    """What was said of the trace and of the members, but not how many there are."""

    pool: int
    block_size: int
    step_tokens: int
    running: int
    policy: str
    gateways: int
    requests: int
    speedup: float
    share: float
    tenants: int
    classes: str
    seed: int

    def setup(self, path: "Path", objective: "LatencyObjective", profile: "StepProfile") -> "PlanSetup":
        """The trace on members of this size."""
        from quire.cli.sim_trace import opened_trace, parsed_shares
        from quire.sim.member import MemberSize
        from quire.sim.planning import PlanSetup
        from quire.sim.policies import POLICIES
        from quire.workload.trace_requests import TraceRules, trace_requests

        if self.policy not in POLICIES:
            raise ConfigError(f"policy must be one of {', '.join(POLICIES)}, {self.policy!r} given")
        rules = TraceRules(self.speedup, self.share, self.tenants, parsed_shares(self.classes))
        trace = opened_trace(path, self.requests)
        return PlanSetup(
            lambda: trace_requests(trace, rules),
            objective,
            profile,
            MemberSize(self.pool, self.block_size, self.step_tokens, self.running),
            self.policy,
            self.gateways,
            report_age_s=0.0 if self.gateways == 1 else 0.25,
            seed=self.seed,
        )


def with_fleet(command: Callable[..., None]) -> Callable[..., None]:
    """The command with these flags; its parameter `fleet` gets them as `FleetFlags`."""
    own = [one for one in inspect.signature(command, eval_str=True).parameters.values() if one.name != "fleet"]
    parameters = [*own, *_FLAGS]

    def with_flags(**given: Any) -> None:
        fleet = FleetFlags(**{one.name: given.pop(one.name) for one in _FLAGS})
        command(fleet=fleet, **given)

    with_flags.__name__, with_flags.__doc__ = command.__name__, command.__doc__
    with_flags.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    with_flags.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return with_flags


def _flag(name: str, kind: Any, default: Any, option: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option])


_FLAGS = (
    _flag("pool", int, 3000, typer.Option(min=2, help="KV blocks that a member has room for.")),
    _flag("block_size", int, 512, typer.Option(min=1, help="Tokens of a block.")),
    _flag("step_tokens", int, 8192, typer.Option(min=1, help="Tokens a step may feed.")),
    _flag("running", int, 256, typer.Option(min=1, help="Sequences that may run at once.")),
    _flag("policy", str, "cost", typer.Option(help="How gateways choose.")),
    _flag("gateways", int, 1, typer.Option(min=1, max=64, help="Gateways before the members.")),
    _flag("requests", int, 0, typer.Option(min=0, help="Only the first so many requests; 0: all.")),
    _flag("speedup", float, 1.0, typer.Option(min=1e-6, help="How many times as fast the trace comes.")),
    _flag("share", float, 1.0, typer.Option(min=0.0, max=1.0, help="Share of its conversations.")),
    _flag("tenants", int, 1, typer.Option(min=1, help="Tenants, by conversation.")),
    _flag("classes", str, "", typer.Option(help="Classes, such as high=0.1,low=0.3.")),
    _flag("seed", int, 1, typer.Option(help="The same seed gives the same plan.")),
)
