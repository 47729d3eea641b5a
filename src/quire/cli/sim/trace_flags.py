"""Dataclasses that define the flags for running a trace on a simulated fleet."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from quire.cli.shared.flags import flag
from quire.errors import ConfigError

if TYPE_CHECKING:
    from quire.sim.fleet.member import MemberSize

REPORT_AGE_S = 0.25
"""Default age of members' load reports, in seconds, if there are several gateways."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetFlags:
    """Flags of the trace, the gateways and each member, without the number of members."""

    gateways: int = flag(1, "number of gateways.", min=1, max=64)
    policy: str = flag("cost", "how gateways choose a member.")
    pool: int = flag(3000, "KV blocks per member.", min=2)
    block_size: int = flag(512, "tokens per block.", min=1)
    step_tokens: int = flag(8192, "maximum tokens per step.", min=1)
    step_ms: int = flag(0, "maximum milliseconds of a step with prefill; 0: limited only by --step-tokens.", min=0)
    running: int = flag(256, "maximum sequences that run at once.", min=1)
    speedup: float = flag(1.0, "factor by which arrivals are sped up.", min=1e-6)
    share: float = flag(1.0, "share of the conversations to use.", min=0.0, max=1.0)
    tenants: int = flag(1, "number of tenants, assigned by conversation.", min=1)
    classes: str = flag("", "class shares such as high=0.1,low=0.3; rest normal.")
    profile: str = flag(
        "prompt=16000,answer=100",
        "duration of steps: a file from `quire bench engine --profile`, or numbers by hand.",
    )
    report_age: float | None = flag(
        None, "age of load reports in seconds; default 0, with several gateways 0.25.", min=0.0, max=3600.0
    )

    @property
    def report_age_s(self) -> float:
        """The age of load reports: the flag, or the default for this number of gateways."""
        if self.report_age is not None:
            return self.report_age
        return 0.0 if self.gateways == 1 else REPORT_AGE_S

    def member_size(self) -> "MemberSize":
        """Return the size of each member."""
        from quire.sim.fleet.member import MemberSize

        sizes = self.pool, self.block_size, self.step_tokens, self.running
        return MemberSize(*sizes, step_limit_s=self.step_ms / 1000)

    def check_policy(self) -> None:
        """Raise ConfigError for an unknown policy."""
        from quire.sim.fleet.policies import POLICIES

        if self.policy not in POLICIES:
            raise ConfigError(f"expected policy to be one of {', '.join(POLICIES)}, got {self.policy!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceFlags(FleetFlags):
    """All flags of a simulated fleet: FleetFlags, the number of members, and faults."""

    members: int = flag(1, "members of the fleet.", min=1, max=1000)
    faults: str = flag("", "faults to inject, such as deaths=2,drains=1,clears=1,joins=2,lost=0.01.")
    detect_delay: float = flag(0.0, "seconds until a death is detected.", min=0.0, max=3600.0)
    save: Path | None = flag(None, "write the requests to this file, in quire's own format, and exit.")  # noqa: RUF009 - a dataclass field
