"""What a supervisor shows of its worker to observers: snapshots, one block, and the records of all workers so far.

Watching continues when the worker is replaced. A query about a block ends with the worker.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from time import monotonic

from quire.core.inspect.snapshots import EngineSnapshot
from quire.engine.commands import GetBlock, StartSnapshots, StopSnapshots
from quire.engine.port import OnBlock, WorkerRecord
from quire.errors import EngineDeadError, MessageError
from quire.worker.messages import BlockInfo, SnapshotMade, ToWorker

MAX_WORKERS = 32
"""Workers whose records are kept."""
GONE = "no worker is ready; retry when one is"


class WorkerWatch:
    """A port for observers, whichever worker is there."""

    def __init__(self, send: Callable[[Sequence[ToWorker]], None]) -> None:
        """`send` sends nothing to a worker that is not ready."""
        self._send = send
        self._watch: StartSnapshots | None = None
        self._show: Callable[[EngineSnapshot], None] = _noop
        self._questions: dict[str, OnBlock] = {}
        self._num_questions = 0
        self._workers: deque[WorkerRecord] = deque(maxlen=MAX_WORKERS)
        self._num_workers = 0

    @property
    def workers(self) -> Sequence[WorkerRecord]:
        return tuple(self._workers)

    # -- for observers -------------------------------------------------------------------------------------------------

    def watch(self, show: Callable[[EngineSnapshot], None], period_s: float) -> None:
        """Show a snapshot so often, of this worker and of those that come after it."""
        self._watch, self._show = StartSnapshots(period_s), show
        self._send([self._watch])

    def unwatch(self) -> None:
        """Stop the snapshots."""
        self._watch, self._show = None, _noop
        self._send([StopSnapshots()])

    def request_block(self, block_id: int, on_block: OnBlock) -> None:
        """Query one block."""
        if not self._workers or self._workers[-1].state != "ready":
            on_block(EngineDeadError(GONE))
            return
        self._num_questions += 1
        question_id = str(self._num_questions)
        self._questions[question_id] = on_block
        self._send([GetBlock(question_id, block_id)])

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
        """It is gone, and so are its open queries."""
        self._workers[-1] = replace(self._workers[-1], state="ended", ended_s=monotonic(), why=why)
        questions, self._questions = self._questions, {}
        for on_block in questions.values():
            on_block(EngineDeadError(GONE))

    def take(self, message: SnapshotMade | BlockInfo) -> None:
        """Show a snapshot, or answer a query. Raises MessageError for an unknown query id."""
        if isinstance(message, SnapshotMade):
            self._show(message.snapshot)
            return
        on_block = self._questions.pop(message.question_id, None)
        if on_block is None:
            raise MessageError(f"the worker answered query {message.question_id[:64]!r}, which is not pending")
        on_block(message.facts)


def _noop(_snapshot: EngineSnapshot) -> None:
    """One that was on its way after `unwatch`."""
