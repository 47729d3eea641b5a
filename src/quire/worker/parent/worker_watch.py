"""What a supervisor shows of its worker to those who look: snapshots, one block, and the lives of all workers so far.

Whoever watches goes on watching when the worker is replaced. A question about a block ends with the worker.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from time import monotonic

from quire.core.inspect.snapshots import EngineSnapshot
from quire.engine.commands import AskBlock, BeginWatch, Unwatch
from quire.engine.port import TellBlock, WorkerRecord
from quire.errors import EngineDeadError, MessageError
from quire.worker.messages import BlockTold, SnapshotMade, ToWorker

MAX_WORKERS = 32
"""Of workers that are remembered."""
GONE = "there is no worker at this moment; ask again when one is ready"


class WorkerWatch:
    """A port to look through, whichever worker is there."""

    def __init__(self, send: Callable[[Sequence[ToWorker]], None]) -> None:
        """`send` says nothing to a worker that is not ready."""
        self._send = send
        self._watch: BeginWatch | None = None
        self._show: Callable[[EngineSnapshot], None] = _unseen
        self._questions: dict[str, TellBlock] = {}
        self._num_questions = 0
        self._workers: deque[WorkerRecord] = deque(maxlen=MAX_WORKERS)
        self._num_workers = 0

    @property
    def workers(self) -> Sequence[WorkerRecord]:
        """The latest workers, the oldest of them first."""
        return tuple(self._workers)

    # -- for those who look --------------------------------------------------------------------------------------------

    def watch(self, show: Callable[[EngineSnapshot], None], period_s: float) -> None:
        """Show a snapshot so often, of this worker and of those that come after it."""
        self._watch, self._show = BeginWatch(period_s), show
        self._send([self._watch])

    def unwatch(self) -> None:
        """Nobody looks any more."""
        self._watch, self._show = None, _unseen
        self._send([Unwatch()])

    def ask_block(self, block_id: int, tell: TellBlock) -> None:
        """Ask what is known of one block."""
        if not self._workers or self._workers[-1].state != "ready":
            tell(EngineDeadError(GONE))
            return
        self._num_questions += 1
        question_id = str(self._num_questions)
        self._questions[question_id] = tell
        self._send([AskBlock(question_id, block_id)])

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
        """It is gone, and so are the answers it owed."""
        self._workers[-1] = replace(self._workers[-1], state="ended", ended_s=monotonic(), why=why)
        questions, self._questions = self._questions, {}
        for tell in questions.values():
            tell(EngineDeadError(GONE))

    def take(self, message: SnapshotMade | BlockTold) -> None:
        """What it shows. Raises MessageError for an answer to nobody."""
        if isinstance(message, SnapshotMade):
            self._show(message.snapshot)
            return
        tell = self._questions.pop(message.question_id, None)
        if tell is None:
            raise MessageError(f"the worker answers question {message.question_id[:64]!r}, which nobody asked")
        tell(message.facts)


def _unseen(_snapshot: EngineSnapshot) -> None:
    """One that was on its way when nobody looked any more."""
