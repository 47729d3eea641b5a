"""What a supervisor shows of its worker to observers: snapshots, and the records of all workers so far.

Watching continues when the worker is replaced.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from time import monotonic

from quire.core.inspect.snapshots import EngineSnapshot
from quire.engine.commands import StartSnapshots, StopSnapshots
from quire.engine.port import WorkerRecord
from quire.worker.messages import ToWorker

MAX_WORKERS = 32
"""Workers whose records are kept."""


class WorkerWatch:
    """A port for observers, whichever worker is there."""

    def __init__(self, send: Callable[[Sequence[ToWorker]], None]) -> None:
        """`send` sends nothing to a worker that is not ready."""
        self._send = send
        self._watch: StartSnapshots | None = None
        self.show: Callable[[EngineSnapshot], None] = _noop
        self._workers: deque[WorkerRecord] = deque(maxlen=MAX_WORKERS)
        self._num_workers = 0

    @property
    def workers(self) -> Sequence[WorkerRecord]:
        return tuple(self._workers)

    # -- for observers -------------------------------------------------------------------------------------------------

    def watch(self, show: Callable[[EngineSnapshot], None], period_s: float) -> None:
        """Show a snapshot so often, of this worker and of those that come after it."""
        self._watch, self.show = StartSnapshots(period_s), show
        self._send([self._watch])

    def unwatch(self) -> None:
        """Stop the snapshots."""
        self._watch, self.show = None, _noop
        self._send([StopSnapshots()])

    # -- for the supervisor --------------------------------------------------------------------------------------------

    def began(self) -> None:
        """A worker is being spawned."""
        self._num_workers += 1
        self._workers.append(WorkerRecord(self._num_workers, "loading", monotonic()))

    def ready(self) -> None:
        """It has loaded its model."""
        if self._workers:
            self._workers[-1] = replace(self._workers[-1], state="ready")
        if self._watch is not None:
            self._send([self._watch])

    def ended(self, why: str) -> None:
        """It is gone."""
        self._workers[-1] = replace(self._workers[-1], state="ended", ended_s=monotonic(), why=why)


def _noop(_snapshot: EngineSnapshot) -> None:
    """One that was on its way after `unwatch`."""
