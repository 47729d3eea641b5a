"""A supervisor's interface for watchers: snapshots of the current worker, and the records of recent workers.

Watching continues with the next worker when a worker is replaced.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from time import monotonic

from quire.engine.commands import Command, StartSnapshots
from quire.engine.port import CommandWatch, WorkerRecord

MAX_WORKERS = 32
"""Number of worker records that are kept."""


class WorkerWatch(CommandWatch):
    """Watches the current worker, across replacements."""

    def __init__(self, send: Callable[[Sequence[Command]], None]) -> None:
        """`send` drops commands while no worker is ready."""
        super().__init__(lambda command: send([command]))
        self._num_workers = 0

    def began(self) -> None:
        """Add the record of a worker that is being spawned."""
        self._num_workers += 1
        record = WorkerRecord(self._num_workers, "loading", monotonic())
        self.workers = (*self.workers, record)[-MAX_WORKERS:]

    def ready(self) -> None:
        """Record that the worker is ready, and resume snapshots."""
        if self.workers:
            self.workers = (*self.workers[:-1], replace(self.workers[-1], state="ready"))
        if self.period_s is not None:
            self._put(StartSnapshots(self.period_s))

    def ended(self, why: str) -> None:
        """Record the worker's end."""
        record = replace(self.workers[-1], state="ended", ended_s=monotonic(), why=why)
        self.workers = (*self.workers[:-1], record)
