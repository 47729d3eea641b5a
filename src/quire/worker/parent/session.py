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
    """Why a worker ended, the requests in flight, and the error for the caller that waits for the first worker."""

    reason: str
    request_ids: tuple[str, ...] = ()
    error: QuireError | None = None
    was_ready: bool = False


@dataclass(slots=True)
class WorkerSession:
    """One worker, its progress, and the reason for its end."""

    process: WorkerProcess
    last_message_s: float
    progress_s: float = 0.0
    last_counts: tuple[int, int] = (0, 0)
    """Heartbeats and layers at the last check; `progress_s` is the time when they last changed."""
    last_step_number: int = 0
    step_start_s: float = 0.0
    is_ready: bool = False
    num_received: int = 0
    reason: str = "died"
    error: QuireError | None = None

    async def run(
        self, on_message: Callable[[ToParent], None], assigned_ids: Callable[[], tuple[str, ...]]
    ) -> SessionEnd:
        """Forward the worker's messages until it ends or sends an invalid message."""
        listen_task = asyncio.create_task(self._listen(on_message))
        exit_task = asyncio.create_task(self.process.exit_event.wait())
        try:
            await asyncio.wait([listen_task, exit_task], return_when=asyncio.FIRST_COMPLETED)
            await self._drain_messages(listen_task)
            return self._result(listen_task, assigned_ids)
        finally:
            for task in (listen_task, exit_task):
                task.cancel()

    def last_progress_s(self, now_s: float) -> float:
        """Return the time, on this process's clock, when a check last found more heartbeats or layers of the worker."""
        status = self.process.status()
        progress = status.num_heartbeats, status.num_layers
        if progress != self.last_counts:
            self.last_counts, self.progress_s = progress, now_s
        return self.progress_s

    def is_silent(self, now_s: float, limit_s: float) -> bool:
        """Whether the worker made no progress for `limit_s`: an idle worker counts heartbeats, and a step counts
        layers. Always false in a step without counted layers, and while the worker admits a request."""
        if now_s - self.last_progress_s(now_s) < limit_s:
            return False
        status = self.process.status()
        return not status.request_ids if status.step is None else status.step.is_counted

    def step_in_flight(self, now_s: float) -> tuple[StepInFlight | None, float]:
        """Return the step in flight, and the seconds since a check first found it; (None, 0) without a step."""
        step = self.process.status().step
        if step is None:
            return None, 0.0
        if step.number != self.last_step_number:
            self.last_step_number, self.step_start_s = step.number, now_s
        return step, now_s - self.step_start_s

    async def _listen(self, on_message: Callable[[ToParent], None]) -> None:
        while True:
            message = await self.process.receive()
            self.last_message_s = monotonic()
            self.num_received += 1
            on_message(message)
            # Receiving a message that has already arrived does not yield; other tasks of this loop need a turn too.
            await asyncio.sleep(0)

    async def _drain_messages(self, listen_task: "asyncio.Task[None]") -> None:
        """Read the messages of a dead worker that are still in transit."""
        num_received = -1
        while num_received != self.num_received and not listen_task.done():
            num_received = self.num_received
            await asyncio.sleep(QUIET_S)

    def _result(self, listen_task: "asyncio.Task[None]", assigned_ids: Callable[[], tuple[str, ...]]) -> SessionEnd:
        error = listen_task.exception() if listen_task.done() else None
        if error is not None:
            # Neither its messages nor its status can be trusted: all its requests count as in flight.
            reason = f"worker {self.process.pid} sent an invalid message: {error}"
            return SessionEnd(reason, assigned_ids(), was_ready=self.is_ready)
        request_ids = self.process.status().request_ids
        return SessionEnd(f"worker {self.process.pid} {self.reason}", request_ids, self.error, self.is_ready)
