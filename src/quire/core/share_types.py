"""What `shares` is given and what it answers: bounds, a place or none. Data without behaviour."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from quire.core.request import PriorityClass
from quire.errors import CapacityError, QueueFullError, TenantShareError

CLASS_RESERVE = 0.1
"""Share of a queue that is kept for each class."""
LEAST_PROMISED = 256
"""So many may be here beyond the bound by promise, however few places there are."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """What is shared, fixed at start."""

    max_places: int
    kinds: tuple[str, ...] = ("",)
    num_kept: int = 0
    """Places kept for each kind, so that a flood of one cannot shut out the others."""
    weights: Mapping[str, float] = field(default_factory=dict)
    """Of tenants by name; all others have weight 1."""
    state: str = "waiting"
    """What a request with a place is, in a sentence."""

    @staticmethod
    def of_queue(
        max_requests: int, class_reserve: float = CLASS_RESERVE, weights: Mapping[str, float] | None = None
    ) -> "Bounds":
        """The places of a queue of requests, some of them kept for each class."""
        kinds = tuple(one.value for one in PriorityClass)
        return Bounds(max_requests, kinds, int(max_requests * class_reserve), weights or {})

    @property
    def max_promised(self) -> int:
        """How many may be here beyond the bound, because they were told to come at this time."""
        return max(self.max_places, LEAST_PROMISED)


@dataclass(frozen=True, slots=True)
class Room:
    """There is a place."""

    is_promised: bool = False
    gives_up: str | None = None
    """Whose place it is; None if it was nobody's."""


FREE = Room()
PROMISED = Room(is_promised=True)


@dataclass(frozen=True, slots=True)
class NoRoom:
    """There is none, and when to ask again."""

    tenant: str
    num_held: int
    limit: int
    retry_after_s: int
    state: str | None
    """What those of its share are that the tenant has used up; None: all places are taken, and nobody gives one up."""

    @property
    def error(self) -> CapacityError:
        """How it is told."""
        if self.state is None:
            return QueueFullError(self.num_held, self.limit, self.retry_after_s)
        return TenantShareError(self.tenant, self.num_held, self.limit, self.retry_after_s, self.state)


class Verdict(msgspec.Struct, array_like=True):
    """What a tenant would be told now that was turned away lately, for those who stand before the queue."""

    tenant: str
    kind: str
    num_room: int
    """So many of its requests would be let in, one after the other."""
    refusal: NoRoom
    """What it is told about those beyond."""
