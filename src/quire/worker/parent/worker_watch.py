"""A supervisor's interface for live views: snapshots of the current worker, and the records of recent workers.

When a worker is replaced, the snapshots continue with the next one.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from time import monotonic

from quire.engine.commands import Command, StartSnapshots
from quire.engine.port import CommandWatch, WorkerRecord

MAX_WORKER_RECORDS = 32
"""Maximum number of records of recent workers."""


class WorkerWatch(CommandWatch):
    """Watches the current worker, across replacements."""

    def __init__(self, send: Callable[[Sequence[Command]], None]) -> None:
        """`send` drops commands while no worker is ready."""
        super().__init__(lambda command: send([command]))
        self._num_spawned = 0

    def add_worker(self) -> None:
        """Add the record of a worker that is being spawned."""
        self._num_spawned += 1
        record = WorkerRecord(self._num_spawned, "loading", monotonic())
        self.workers = (*self.workers, record)[-MAX_WORKER_RECORDS:]

    def mark_ready(self) -> None:
        """Record that the worker is ready, and resume snapshots."""
        if self.workers:
            self.workers = (*self.workers[:-1], replace(self.workers[-1], state="ready"))
        if self.period_s is not None:
            self._put(StartSnapshots(self.period_s))

    def mark_ended(self, reason: str) -> None:
        """Record the worker's end."""
        record = replace(self.workers[-1], state="ended", ended_s=monotonic(), why=reason)
        self.workers = (*self.workers[:-1], record)
