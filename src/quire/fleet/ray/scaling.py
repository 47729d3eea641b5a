"""How many members a fleet needs, by the work they have. Pure.

A member's load is the part of a member that its work would fill: by prompt tokens that wait to be computed, or by
running sequences, the larger of both. All loads together, rounded up, are the members that are needed. How soon members
start or end, and between which bounds, is the control plane's to decide.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil

from quire.errors import ConfigError
from quire.fleet.member.status import MemberStatus

TOKENS_PER_MEMBER = 4096
"""Some seconds of a CPU's work, and less than one of a GPU's."""
ALMOST = 1e-6
"""Sums of floats are not exact: one bit too many must not add a member."""


@dataclass(frozen=True, slots=True)
class ScalingRule:
    """How much work one member should have."""

    num_tokens: int = TOKENS_PER_MEMBER
    """Prompt tokens that may wait to be computed."""
    num_running: int = 64
    """Sequences that may run at once: as many as the member's own limit."""

    def __post_init__(self) -> None:
        if self.num_tokens < 1 or self.num_running < 1:
            numbers = f"{self.num_tokens} and {self.num_running}"
            raise ConfigError(f"expected at least 1 waiting token and 1 running sequence to scale by, got {numbers}")


def load_of(status: MemberStatus, rule: ScalingRule) -> float:
    """How many members the work of this one would fill."""
    return max(status.num_uncomputed_tokens / rule.num_tokens, status.num_running / rule.num_running)


def wanted_members(loads: Iterable[float]) -> int:
    """How many there should be; at least one, which serves the next request."""
    return max(1, ceil(sum(loads) - ALMOST))
