"""The session of one worker, from its first message to its end, from the supervisor's side."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic

from quire.errors import QuireError
from quire.worker.child.shared_status import StepInFlight
from quire.worker.messages import ToParent
from quire.worker.parent.handle import WorkerProcess

QUIET_S = 0.03
"""After a worker's death, reading stops when no message has arrived for this long."""


@dataclass(frozen=True, slots=True)
class SessionEnd:
    """Why a worker ended, the requests in flight, and the error for a caller that is waiting for the first worker."""

    reason: str
    request_ids: tuple[str, ...] = ()
    error: QuireError | None = None
    was_ready: bool = False


@dataclass(slots=True)
class WorkerSession:
    """One worker, its progress, and the reason of its end."""

    process: WorkerProcess
    last_message_s: float
    progress_s: float = 0.0
    progress_seen: tuple[int, int] = (0, 0)
    """Beats and layers at the last check."""
    step_seen: int = 0
    step_began_s: float = 0.0
    is_ready: bool = False
    num_received: int = 0
    reason: str = "died"
    error: QuireError | None = None

    async def run(
        self, on_message: Callable[[ToParent], None], names_sent: Callable[[], tuple[str, ...]]
    ) -> SessionEnd:
        """Forward the worker's messages until it ends or sends an invalid message."""
        listening = asyncio.create_task(self._listen(on_message))
        gone = asyncio.create_task(self.process.gone.wait())
        try:
            await asyncio.wait([listening, gone], return_when=asyncio.FIRST_COMPLETED)
            await self._drain_messages(listening)
            return self._end(listening, names_sent)
        finally:
            for task in (listening, gone):
                task.cancel()

    def last_progress_s(self, now_s: float) -> float:
        """Return when the worker's beats or layers were last seen to change, on this process's clock."""
        flight = self.process.flight()
        progress = flight.num_beats, flight.num_layers
        if progress != self.progress_seen:
            self.progress_seen, self.progress_s = progress, now_s
        return self.progress_s

    def is_silent(self, now_s: float, limit_s: float) -> bool:
        """Whether progress was expected but none was seen for `limit_s`: an idle worker beats, and a step counts
        layers. Always false in a step without counted layers, and while the worker admits a request."""
        if now_s - self.last_progress_s(now_s) < limit_s:
            return False
        flight = self.process.flight()
        return not flight.request_ids if flight.step is None else flight.step.is_counted

    def step_in_flight(self, now_s: float) -> tuple[StepInFlight | None, float]:
        """Return the step in flight, and for how long it has been observed."""
        step = self.process.flight().step
        if step is None:
            return None, 0.0
        if step.number != self.step_seen:
            self.step_seen, self.step_began_s = step.number, now_s
        return step, now_s - self.step_began_s

    async def _listen(self, on_message: Callable[[ToParent], None]) -> None:
        while True:
            message = await self.process.receive()
            self.last_message_s = monotonic()
            self.num_received += 1
            on_message(message)
            # Receiving a message that has already arrived does not yield; other tasks of this loop need a turn too.
            await asyncio.sleep(0)

    async def _drain_messages(self, listening: "asyncio.Task[None]") -> None:
        """Read the messages of a dead worker that are still in transit."""
        num_received = -1
        while num_received != self.num_received and not listening.done():
            num_received = self.num_received
            await asyncio.sleep(QUIET_S)

    def _end(self, listening: "asyncio.Task[None]", names_sent: Callable[[], tuple[str, ...]]) -> SessionEnd:
        error = listening.exception() if listening.done() else None
        if error is not None:
            # Neither its messages nor its status can be trusted: all its requests count as in flight.
            reason = f"worker {self.process.pid} sent an invalid message: {error}"
            return SessionEnd(reason, names_sent(), was_ready=self.is_ready)
        names = self.process.flight().request_ids
        return SessionEnd(f"worker {self.process.pid} {self.reason}", names, self.error, self.is_ready)
