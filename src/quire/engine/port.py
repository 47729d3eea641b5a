"""What stands between a client and an engine, wherever it steps: a thread, a worker, or another machine.

    submit · cancel ─► engine ─► events, all through one listener
               call ─► engine ─► one reply for each

Whatever becomes of a request is an event of its id, a refusal too.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from quire.core.events import RequestEvent
from quire.core.inspect.snapshots import EngineSnapshot
from quire.core.request import Request
from quire.core.scheduling.shares import AdmissionHint
from quire.engine.calls import CallOp, OnReply

Listener = Callable[[Sequence[RequestEvent]], None]
OnFailure = Callable[[BaseException], None]


@dataclass(frozen=True, slots=True)
class WorkerRecord:
    """One worker process, from its beginning to its end."""

    number: int
    """1 is the first."""
    state: str
    """`loading`, `ready` or `ended`."""
    started_s: float
    ended_s: float | None = None
    why: str | None = None
    """It ended."""


class WatchPort(Protocol):
    """Through which an engine is watched. Nothing is made while no one watches."""

    @property
    def workers(self) -> Sequence[WorkerRecord]:
        """Of its workers, if it has any: the oldest first."""
        ...

    def watch(self, show: Callable[[EngineSnapshot], None], period_s: float) -> None:
        """Show a snapshot so often, until `unwatch`; on whatever thread. The second time replaces the first."""
        ...

    def unwatch(self) -> None:
        """Stop the snapshots."""
        ...


class EnginePort(Protocol):
    """Where requests go."""

    verdicts: Sequence[AdmissionHint]
    """What tenants would be told that the queue turned away lately, as of the last events. Never changed, but replaced
    by others."""

    @property
    def watching(self) -> WatchPort:
        """Through which it is looked at."""
        ...

    def submit(self, request: Request) -> None:
        """Queue a request: `Queued` or `Refused` is its first event."""
        ...

    def cancel(self, request_id: str, index: int | None = None) -> None:
        """End a request, or one of its answers alone, if it lives."""
        ...

    def clear_cache(self) -> None:
        """Forget every cached block that is not in use."""
        ...

    def call(self, op: CallOp, on_reply: OnReply) -> None:
        """Query the engine."""
        ...
