"""The commands to an engine, as tagged structs: the same in a thread's queue and on the wire to a worker.

The clocks of two processes may differ. A request is therefore sent with its age and its time left, and the receiver
converts both to times on its own clock. The transfer time (up to about one step) is counted in neither.
"""

from typing import Self

from msgspec.structs import asdict

from quire.core.digests import Namespace
from quire.core.request import Continuation, PriorityClass, PromptPin, Request, ResolvedSampling
from quire.engine.calls import EngineCall, WireMessage


class _Assignment(WireMessage, frozen=True):
    """A `core.request.Request` with durations in place of points in time."""

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
    reports_progress: bool = False
    pins: tuple[PromptPin, ...] = ()

    @classmethod
    def of(cls, request: Request, now_s: float) -> Self:
        """Convert a request for sending at `now_s`, on the sender's clock."""
        fields = asdict(request)
        age_s, deadline_s = now_s - fields.pop("arrival_s"), fields.pop("deadline_s")
        return cls(age_s=age_s, time_left_s=None if deadline_s is None else deadline_s - now_s, **fields)

    def to_request(self, now_s: float) -> Request:
        """Return the request with times on the receiver's clock."""
        fields = asdict(self)
        arrival_s, left_s = now_s - fields.pop("age_s"), fields.pop("time_left_s")
        return Request(arrival_s=arrival_s, deadline_s=None if left_s is None else now_s + left_s, **fields)


class Submit(_Assignment, frozen=True):
    """A new request; the engine may refuse it."""


class Restore(_Assignment, frozen=True):
    """A request that an earlier engine had admitted, with the tokens produced so far."""


class Cancel(WireMessage, frozen=True):
    """End a request, or a single continuation of it; unknown ids are ignored."""

    request_id: str
    index: int | None = None
    """The continuation to end; None: all of them."""


class ClearCache(WireMessage, frozen=True):
    """Drop every cached block that is not in use."""


class StartSnapshots(WireMessage, frozen=True):
    """Send a snapshot every `period_s` seconds until StopSnapshots."""

    period_s: float


class StopSnapshots(WireMessage, frozen=True):
    """Stop the snapshots."""


class Close(WireMessage, frozen=True):
    """The last command: stop after the step in flight."""


Command = Submit | Restore | Cancel | EngineCall | ClearCache | StartSnapshots | StopSnapshots | Close
