"""The interface between a client and an engine, which may run in a thread, a worker process or on another machine.

    submit · cancel ─► engine ─► events, all through one listener
               call ─► engine ─► one reply for each call

Every outcome of a request, refusals included, is an event with its id.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from quire.core.events import RequestEvent
from quire.core.inspect.snapshots import EngineSnapshot
from quire.core.request import Request
from quire.core.scheduling.shares import AdmissionHint
from quire.engine.calls import CallOp, OnReply
from quire.engine.commands import Command, StartSnapshots, StopSnapshots

Listener = Callable[[Sequence[RequestEvent]], None]
OnFailure = Callable[[BaseException], None]


@dataclass(frozen=True, slots=True)
class WorkerRecord:
    """The lifetime of one worker process."""

    number: int
    """Number of the worker, counted from 1."""
    state: str
    """`loading`, `ready` or `ended`."""
    started_s: float
    ended_s: float | None = None
    why: str | None = None
    """Why the worker ended; None while it runs."""


class WatchPort(Protocol):
    """The interface for watching an engine. Snapshots are made only while it is watched."""

    @property
    def workers(self) -> Sequence[WorkerRecord]:
        """The engine's worker processes, oldest first; empty if it runs in this process."""

    def watch(self, show: Callable[[EngineSnapshot], None], period_s: float) -> None:
        """Call `show` every `period_s` seconds until `unwatch`, on any thread. A second call replaces the first."""

    def unwatch(self) -> None:
        """Stop the snapshots."""


class CommandWatch:
    """A `WatchPort` that sends `StartSnapshots` and `StopSnapshots` to the engine."""

    def __init__(self, put: Callable[[Command], object]) -> None:
        self._put = put
        self.workers: Sequence[WorkerRecord] = ()
        self.show: Callable[[EngineSnapshot], None] = _discard
        self.period_s: float | None = None
        """Seconds between snapshots; None: not watched."""

    def watch(self, show: Callable[[EngineSnapshot], None], period_s: float) -> None:
        self.show, self.period_s = show, period_s
        self._put(StartSnapshots(period_s))

    def unwatch(self) -> None:
        self.show, self.period_s = _discard, None
        self._put(StopSnapshots())


def _discard(_snapshot: EngineSnapshot) -> None:
    """Discard a snapshot that was in transit at `unwatch`."""


class EnginePort(Protocol):
    """The client's interface to an engine."""

    admission_hints: Sequence[AdmissionHint]
    """Admission hints for tenants with recently refused requests, as of the last events. Never modified, only
    replaced."""

    @property
    def watching(self) -> WatchPort:
        """The interface for watching this engine."""

    def submit(self, request: Request) -> None:
        """Queue a request; its first event is `Queued` or `Refused`."""

    def cancel(self, request_id: str, index: int | None = None) -> None:
        """End a request, or a single continuation of it; unknown ids are ignored."""

    def clear_cache(self) -> None:
        """Drop every cached block that is not in use."""

    def call(self, op: CallOp, on_reply: OnReply) -> None:
        """Send a query to the engine; `on_reply` receives its result or an error."""
