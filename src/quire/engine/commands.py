"""What an engine may be told, as tagged structs: the same in a thread's queue and on the wire to a worker.

Two processes need not agree what time it is. So a request travels with its age and the time it has left at the moment
of sending, and becomes instants again on the clock of the receiver. What it spends on the way, at most about a
step, counts for neither.
"""

from typing import Self

from msgspec.structs import asdict

from quire.core.digests import Namespace
from quire.core.request import Continuation, PriorityClass, Request, ResolvedSampling
from quire.engine.calls import EngineCall, WireMessage


class _Assignment(WireMessage, frozen=True):
    """A request, as `core.request.Request` describes it, with durations where that has instants."""

    request_id: str
    epoch: int
    age_s: float
    time_left_s: float | None
    prompt: tuple[int, ...]
    namespace: Namespace
    params: ResolvedSampling
    seed: int
    tenant: str
    priority: PriorityClass
    continuations: tuple[Continuation, ...]
    is_explained: bool
    has_reservation: bool
    grammar: str | None = None
    has_stop_texts: bool = False
    work_tokens: int = 0

    @classmethod
    def sent(cls, request: Request, now_s: float) -> Self:
        """A request as it is sent at this moment."""
        fields = asdict(request)
        age_s, deadline_s = now_s - fields.pop("arrival_s"), fields.pop("deadline_s")
        return cls(age_s=age_s, time_left_s=None if deadline_s is None else deadline_s - now_s, **fields)

    def received(self, now_s: float) -> Request:
        """The request on the clock of the receiver."""
        fields = asdict(self)
        arrival_s, left_s = now_s - fields.pop("age_s"), fields.pop("time_left_s")
        return Request(arrival_s=arrival_s, deadline_s=None if left_s is None else now_s + left_s, **fields)


class Submit(_Assignment, frozen=True):
    """A new request: it may be refused."""


class Restore(_Assignment, frozen=True):
    """A request that an engine before this one had let in, with the tokens it had."""


class Cancel(WireMessage, frozen=True):
    """End a request, or one of its answers alone, if it lives."""

    request_id: str
    index: int | None = None
    """Which answer; None: all of them."""


class ClearCache(WireMessage, frozen=True):
    """Forget every cached block that is not in use."""


class StartSnapshots(WireMessage, frozen=True):
    """Show a snapshot so often, until StopSnapshots."""

    period_s: float


class StopSnapshots(WireMessage, frozen=True):
    """Stop the snapshots."""


class Close(WireMessage, frozen=True):
    """The last one: end after the step in flight."""


Command = Submit | Restore | Cancel | EngineCall | ClearCache | StartSnapshots | StopSnapshots | Close
