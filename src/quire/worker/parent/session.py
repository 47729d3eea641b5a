"""One worker from its first message to its end, as the supervisor sees it."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic

from quire.errors import QuireError
from quire.worker.child.shared_status import StepInFlight
from quire.worker.messages import ToParent
from quire.worker.parent.handle import WorkerProcess

QUIET_S = 0.03
"""After a worker's end its messages are read until none has come for this long."""


@dataclass(frozen=True, slots=True)
class SessionEnd:
    """Why a worker ended, who was in flight, and what a caller who waits for the first one should be told."""

    reason: str
    request_ids: tuple[str, ...] = ()
    error: QuireError | None = None
    was_ready: bool = False


@dataclass(slots=True)
class WorkerSession:
    """One worker, and what is known of why it ends."""

    process: WorkerProcess
    heard_s: float
    progress_s: float = 0.0
    progress_seen: tuple[int, int] = (0, 0)
    """Beats and layers."""
    step_seen: int = 0
    step_began_s: float = 0.0
    is_ready: bool = False
    num_heard: int = 0
    reason: str = "died"
    error: QuireError | None = None

    async def run(self, hear: Callable[[ToParent], None], names_sent: Callable[[], tuple[str, ...]]) -> SessionEnd:
        """Hand on what the worker says until it has ended, or has said what cannot be."""
        listening = asyncio.create_task(self._listen(hear))
        gone = asyncio.create_task(self.process.gone.wait())
        try:
            await asyncio.wait([listening, gone], return_when=asyncio.FIRST_COMPLETED)
            await self._drain_messages(listening)
            return self._end(listening, names_sent)
        finally:
            for task in (listening, gone):
                task.cancel()

    def last_progress_s(self, now_s: float) -> float:
        """When its loop was first seen to have come round, or a layer of its step to be done, as often as they have: on
        our clock, whatever its own says."""
        flight = self.process.flight()
        progress = flight.num_beats, flight.num_layers
        if progress != self.progress_seen:
            self.progress_seen, self.progress_s = progress, now_s
        return self.progress_s

    def is_silent(self, now_s: float, limit_s: float) -> bool:
        """It would have shown progress for this long if it made any: idle it beats, and in a step layers are counted.
        Where they are not, and while it takes in a request, nothing can be told."""
        if now_s - self.last_progress_s(now_s) < limit_s:
            return False
        flight = self.process.flight()
        return not flight.request_ids if flight.step is None else flight.step.is_counted

    def step_in_flight(self, now_s: float) -> tuple[StepInFlight | None, float]:
        """The step that runs, and for how long it was seen to."""
        step = self.process.flight().step
        if step is None:
            return None, 0.0
        if step.number != self.step_seen:
            self.step_seen, self.step_began_s = step.number, now_s
        return step, now_s - self.step_began_s

    async def _listen(self, hear: Callable[[ToParent], None]) -> None:
        while True:
            message = await self.process.receive()
            self.heard_s = monotonic()
            self.num_heard += 1
            hear(message)
            # A message that is there already does not make us wait; everybody else on this loop wants a turn too.
            await asyncio.sleep(0)

    async def _drain_messages(self, listening: "asyncio.Task[None]") -> None:
        """A dead worker's messages may still be on their way."""
        num_heard = -1
        while num_heard != self.num_heard and not listening.done():
            num_heard = self.num_heard
            await asyncio.sleep(QUIET_S)

    def _end(self, listening: "asyncio.Task[None]", names_sent: Callable[[], tuple[str, ...]]) -> SessionEnd:
        lie = listening.exception() if listening.done() else None
        if lie is not None:
            # What it says cannot be trusted, and who is behind it cannot be told: all it had count as in flight.
            reason = f"worker {self.process.pid} said what cannot be: {lie}"
            return SessionEnd(reason, names_sent(), was_ready=self.is_ready)
        names = self.process.flight().request_ids
        return SessionEnd(f"worker {self.process.pid} {self.reason}", names, self.error, self.is_ready)
