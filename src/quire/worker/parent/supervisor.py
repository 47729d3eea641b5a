"""The parent's side of a worker: spawns, watches and replaces it, and resubmits the requests of a dead worker.

    spawn ─► load ─► serve ─► end ──┬─► spawn again, at once if the last worker made progress, else with growing delays
                                    └─► after too many workers without progress: give up, and refuse all requests

For clients it is an engine port, like a thread that steps an engine in this process, but it outlives its engine. The
ledger makes all decisions about requests. All methods run on the event loop that spawned the worker.
"""

import asyncio
import contextlib
import logging
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from enum import Enum
from itertools import accumulate
from time import monotonic

import msgspec
import zmq
import zmq.asyncio

from quire.core.events import Refused, RequestEvent
from quire.core.request import Request
from quire.core.scheduling.shares import MIN_RESERVED, AdmissionHint
from quire.engine.calls import CallOp, CallReply, OnReply, PendingCalls
from quire.engine.commands import ClearCache, Close
from quire.engine.port import Listener, OnFailure
from quire.errors import (
    CheckpointError,
    ConfigError,
    DrainingError,
    EngineDeadError,
    QueueFullError,
    QuireError,
)
from quire.worker.child.shared_status import WorkerStatus
from quire.worker.messages import Failed, LoadProgress, Ready, SnapshotMade, Stepped, ToParent, ToWorker, WorkerLoad
from quire.worker.parent.handle import WorkerProcess
from quire.worker.parent.ledger import Ledger
from quire.worker.parent.session import SessionEnd, WorkerSession
from quire.worker.parent.spawned_worker import SpawnedWorker
from quire.worker.parent.worker_plan import WorkerPlan
from quire.worker.parent.worker_watch import WorkerWatch

log = logging.getLogger("quire.worker")

TICK_S = 0.1
"""Interval between checks of a worker's progress and of held requests' deadlines."""
NOT_READY = "no worker is ready; retry when one is"
LATE_S = 2.0
"""If a check comes later than this, the operating system had paused this process, and probably the worker too."""


STEP_SIZE_BOUNDS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""Histogram buckets as used by other servers."""


class StepSizes(Counter[int]):
    """Number of steps by token count, over all workers. A step's token budget bounds the number of keys."""

    @property
    def num_tokens(self) -> int:
        return sum(size * count for size, count in self.items())

    def cumulative(self) -> list[tuple[str, int]]:
        """Return cumulative counts: for each bound, and finally +Inf, the number of steps that are not larger."""
        counts = [0] * (len(STEP_SIZE_BOUNDS) + 1)
        for size, count in self.items():
            counts[bisect_left(STEP_SIZE_BOUNDS, size)] += count
        bounds = [*(str(float(bound)) for bound in STEP_SIZE_BOUNDS), "+Inf"]
        return list(zip(bounds, accumulate(counts), strict=True))


class State(Enum):
    """The state of a supervisor."""

    LOADING = "loading"
    READY = "ready"
    RESTARTING = "restarting"
    DRAINING = "draining"
    CLOSED = "closed"
    FAILED = "failed"


class Supervisor:
    """Keeps a worker running for one model, and replaces it without interrupting clients."""

    def __init__(
        self, plan: WorkerPlan, listener: Listener, on_failure: OnFailure, first: SpawnedWorker | None = None
    ) -> None:
        """`first`: a process that was spawned earlier, to use as the first worker."""
        self._plan = plan
        self._first = first
        self._context = zmq.asyncio.Context()
        self._max_open = plan.open_message.queue.max_requests + plan.open_message.settings.max_running
        self._listener = listener
        self._on_failure = on_failure
        self.ledger = Ledger()
        self._calls = PendingCalls()
        self.watching = WorkerWatch(self._send)
        self.session: WorkerSession | None = None
        self._ready: asyncio.Future[Ready] | None = None
        self._idle = asyncio.Event()
        self._closing = asyncio.Event()
        self._may_run = asyncio.Event()
        """Not set while the supervisor is suspended: open requests are held, and no worker is spawned."""
        self._may_run.set()
        self._is_suspended = asyncio.Event()
        """Set when the supervisor is suspended and no worker is left."""
        self.open_sent = asyncio.Event()
        """Set once a worker was sent its first message, or never will be. Until then do no other work in the parent."""
        self._tasks: list[asyncio.Task[None]] = []
        self._resumed_s = monotonic()
        self.state = State.LOADING
        self.num_restarts = 0
        self._load = WorkerLoad()
        self._num_computed_reported = 0
        self.admission_hints: Sequence[AdmissionHint] = ()
        self.step_sizes = StepSizes()

    # -- lifecycle -----------------------------------------------------------------------------------------------------

    async def start(self) -> Ready:
        """Spawn a worker and wait until its model is loaded. Raises CheckpointError, ConfigError or EngineDeadError."""
        self._ready = asyncio.get_running_loop().create_future()
        self._ready.add_done_callback(lambda ready: ready.cancelled() or ready.exception())  # may never be awaited
        self._tasks = [
            asyncio.create_task(self._run(), name="quire-supervisor"),
            asyncio.create_task(self._watch(), name="quire-watch"),
        ]
        return await asyncio.shield(self._ready)

    async def suspend(self) -> None:
        """End the worker without replacing it. Open requests are held until `resume` spawns another."""
        self._may_run.clear()
        if self.session is not None:
            self.session.reason = "was stopped; its open requests are held"
            self.session.process.kill()
        await self._is_suspended.wait()

    async def resume(self) -> None:
        """Spawn a worker after `suspend` and wait until its model is loaded. Raises the same errors as `start`."""
        if self._closing.is_set():
            raise EngineDeadError("the worker failed and is not restarted; restart the server")
        self._ready = asyncio.get_running_loop().create_future()
        self._ready.add_done_callback(lambda ready: ready.cancelled() or ready.exception())
        self._is_suspended.clear()
        self._may_run.set()
        await asyncio.shield(self._ready)

    @property
    def is_ready(self) -> bool:
        """Whether a worker has loaded its model and is not known to be stuck. A long step does not change this, because
        new requests are served after it."""
        session = self.session
        if self.state not in (State.READY, State.DRAINING) or session is None or not session.is_ready:
            return False
        now_s = monotonic()
        return not session.is_silent(now_s, self._plan.limits.not_ready_after_s)

    @property
    def step_s(self) -> float:
        """Duration of the step in flight so far, in seconds; 0 if there is none."""
        session = self.session
        return 0.0 if session is None or not session.is_ready else session.step_in_flight(monotonic())[1]

    @property
    def load(self) -> WorkerLoad:
        """The worker's last reported load, plus the finished share of the step in flight."""
        session, computed = self.session, self._load.num_computed_tokens
        step = None if session is None or not session.is_ready else session.step_in_flight(monotonic())[0]
        if step is not None:
            computed += int(step.share * step.num_tokens)
        # The end of a step is visible before its load arrives, but the counter must never decrease.
        self._num_computed_reported = max(computed, self._num_computed_reported)
        return msgspec.structs.replace(self._load, num_computed_tokens=self._num_computed_reported)

    @property
    def pid(self) -> int | None:
        return None if self.session is None else self.session.process.pid

    @property
    def num_open(self) -> int:
        return len(self.ledger.entries)

    def worker_status(self) -> WorkerStatus:
        """Return the worker's status. Raises EngineDeadError if there is no worker."""
        if self.session is None:
            raise EngineDeadError(NOT_READY)
        return self.session.process.status()

    async def drain(self, timeout_s: float) -> bool:
        """Refuse new requests and wait until open requests have ended. Returns False on timeout or failure."""
        if self.state in (State.LOADING, State.READY, State.RESTARTING):
            self.state = State.DRAINING
        self._update_idle()
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        except TimeoutError:
            return False
        return self.state is not State.FAILED

    async def close(self) -> None:
        """End the worker, gracefully if it is ready; open requests are cut off."""
        self.state = State.FAILED if self.state is State.FAILED else State.CLOSED
        self._closing.set()
        self._may_run.set()
        session = self.session
        if session is not None and not session.process.exit_event.is_set():
            if session.is_ready:
                session.process.send(Close())
                await _wait_for(self._plan.limits.close_s, session.process.exit_event)
            session.process.kill()
        await asyncio.gather(*self._tasks)
        self._context.destroy(linger=0)

    # -- a port --------------------------------------------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        try:
            self._check_room(request)
        except QuireError as error:
            self._listener([Refused.of(request.request_id, error)])
            return
        self.ledger.add(request)
        self._idle.clear()
        self._send_due()

    def cancel(self, request_id: str, index: int | None = None) -> None:
        ledger = self.ledger
        commands, events = ledger.cancel(request_id) if index is None else ledger.cancel_answer(request_id, index)
        self._send(commands)
        self._emit(events)
        self._send_due()

    def call(self, op: CallOp, on_reply: OnReply) -> None:
        """Query the worker. If the worker ends first, the call fails."""
        if self.session is None or not self.session.is_ready:
            on_reply(EngineDeadError(NOT_READY))
            return
        self._send([self._calls.open(op, on_reply)])

    def clear_cache(self) -> None:
        """Drop every cached block that is not in use."""
        self._send([ClearCache()])

    def _check_room(self, request: Request) -> None:
        if self._closing.is_set():
            raise EngineDeadError("the worker failed and is not restarted; restart the server")
        if self.state is State.DRAINING:
            raise DrainingError(
                "the server is shutting down and takes no new requests; use another one, or retry later"
            )
        # The worker's queue applies classes and shares. While the worker is stuck, absent or runs only a suspect,
        # requests wait here: per tenant at most as many as the worker could hold. Requests that displace others, have a
        # reservation or began on another server may exceed that, in total by as much again (at least MIN_RESERVED).
        num_own, limit = self.ledger.num_open_of[request.tenant], self._max_open + max(self._max_open, MIN_RESERVED)
        if num_own >= self._max_open and not request.has_reservation and not request.has_begun:
            raise QueueFullError(num_own, self._max_open)
        if self.num_open >= limit:
            raise QueueFullError(self.num_open, limit)

    # -- one worker after the other ------------------------------------------------------------------------------------

    async def _run(self) -> None:
        """Run one worker after another; after the last one, refuse all requests that are not queued."""
        error: QuireError = EngineDeadError("the worker was closed")
        try:
            error = await self._run_workers()
        except Exception as exception:
            log.exception("the supervisor of a worker has failed")
            error = EngineDeadError(f"the supervisor failed: {exception!r}", code="supervisor_failed")
        finally:
            self._end_all(error)

    async def _run_workers(self) -> QuireError:
        """Run workers until no further one should be spawned; return the reason as an error."""
        num_failed_workers = 0
        while not self._closing.is_set():
            if not self._may_run.is_set():
                self.state = State.LOADING if self.state in (State.READY, State.RESTARTING) else self.state
                self._is_suspended.set()
                await self._may_run.wait()
                continue
            previous_progress = self.ledger.num_progress
            self.watching.add_worker()
            end = await self._run_worker()
            self.watching.mark_ended(end.reason)
            self._calls.fail_all(EngineDeadError("the worker exited during a cache query; retry"))
            if not self._may_run.is_set():
                self._emit(self.ledger.hold_all())
                continue
            is_idle = end.was_ready and not self.ledger.entries
            has_progress = self.ledger.num_progress > previous_progress
            self._emit(self.ledger.record_crash(end.request_ids))
            has_progress = has_progress or self.ledger.num_progress > previous_progress
            num_failed_workers = 0 if is_idle or has_progress else num_failed_workers + 1
            if self._closing.is_set():
                break
            if end.error is not None and self._ready is not None and not self._ready.done():
                return end.error  # the model or a setting is wrong, so a retry cannot succeed
            if num_failed_workers >= self._plan.limits.max_workers_without_progress:
                message = f"giving up: {num_failed_workers} consecutive workers made no progress; last: {end.reason}"
                return EngineDeadError(message, code="workers_made_no_progress")
            log.warning("%s; starting a new one", end.reason)
            self.num_restarts += 1
            self.state = State.RESTARTING if self.state is State.READY else self.state
            await _wait_for(self._plan.limits.delay_s(num_failed_workers), self._closing)
        return EngineDeadError("the worker was closed")

    def _end_all(self, error: QuireError) -> None:
        """Fail everything that waits, because no further worker will be spawned. Called exactly once."""
        self.open_sent.set()
        self._is_suspended.set()
        if self._ready is not None and not self._ready.done():
            self._ready.set_exception(error)
        self._emit(self.ledger.abandon(error))
        self._calls.fail_all(error)
        self._update_idle()
        self._context.destroy(linger=0)
        if not self._closing.is_set():
            log.error("%s", error)
            self.state = State.FAILED
            self._closing.set()
            self._on_failure(error)

    async def _run_worker(self) -> SessionEnd:
        """Run one worker from spawning to its end."""
        plan = self._plan
        first, self._first = self._first, None
        try:
            process = WorkerProcess(self._context, self._max_open, plan.command, plan.environment, first)
        except (OSError, zmq.ZMQError) as error:
            return SessionEnd(f"no worker could be spawned: {error}")
        except QuireError as error:
            return SessionEnd(f"no worker could be spawned: {error}", error=error)
        self.session = session = WorkerSession(process, monotonic())
        process.send(plan.open_message)
        self.open_sent.set()
        try:
            return await session.run(lambda message: self._on_message(session, message), self.ledger.assigned_ids)
        finally:
            self.session = None
            code = await process.close()
            level = logging.DEBUG if self._closing.is_set() else logging.INFO  # ended by this process
            log.log(level, "worker %d has ended with code %d", process.pid, code)

    def _on_message(self, session: WorkerSession, message: ToParent) -> None:
        self.handle(session, message)
        self._send_due()
        self._update_idle()

    def handle(self, session: WorkerSession, message: ToParent) -> None:
        """Handle one message of a worker."""
        match message:
            case Stepped():
                if message.load is not None:
                    self._load, self.admission_hints = message.load, message.load.admission_hints
                    self.step_sizes.update(message.load.step_tokens)
                self._take_events(message)
            case LoadProgress(label, done_bytes, total_bytes):
                self._plan.progress(label, done_bytes, total_bytes)
            case Ready():
                self._mark_ready(session, message)
            case SnapshotMade(snapshot):
                self.watching.show(snapshot)
            case CallReply():
                self._calls.resolve(message)
            case _:
                self._record_failure(session, message)

    @staticmethod
    def _record_failure(session: WorkerSession, failed: Failed) -> None:
        session.reason = f"failed: {failed.kind}: {failed.message}"
        error_type = _PERMANENT_ERRORS.get(failed.kind)
        session.error = None if error_type is None else error_type(failed.message, code=failed.code)

    def _take_events(self, message: Stepped) -> None:
        new_events: list[RequestEvent] = []
        try:
            self.ledger.take(message.events, new_events)
        finally:
            self._emit(new_events)

    def _mark_ready(self, session: WorkerSession, ready: Ready) -> None:
        session.is_ready = True
        self._load, self._num_computed_reported = WorkerLoad(), 0
        self.admission_hints = ()  # these are admission hints of the previous worker's queue
        self.ledger.vocabulary_size = ready.info.vocabulary_size
        if self.state in (State.LOADING, State.RESTARTING):
            self.state = State.READY
        self.watching.mark_ready()
        log.info("worker %d is ready; resuming %d requests", session.process.pid, self.num_open)
        if self._ready is not None and not self._ready.done():
            self._ready.set_result(ready)

    async def _watch(self) -> None:
        """Kill a worker without progress, and end held requests at their deadline. If this process was paused, the
        worker's time limits start again."""
        last_s = monotonic()
        while not self._closing.is_set():
            now_s = monotonic()
            if now_s - last_s > LATE_S:
                self._resumed_s = now_s
            last_s = now_s
            self._emit(self.ledger.expire(now_s))
            if self.session is not None:
                self.check_progress(self.session, now_s)
            await _wait_for(TICK_S, self._closing)

    def check_progress(self, session: WorkerSession, now_s: float) -> None:
        """Kill a worker that made no progress, or sent nothing while loading, for too long."""
        limits = self._plan.limits
        last_sign_s = session.last_progress_s(now_s) if session.is_ready else session.last_message_s
        session.step_in_flight(now_s)
        since_s = max(last_sign_s, self._resumed_s)
        limit_s = limits.stuck_s if session.is_ready else limits.load_silence_s
        if now_s - since_s > limit_s:
            phase = "in a step" if session.is_ready else "while loading"
            session.reason = f"was stuck {phase} for more than {limit_s:g} s and was killed"
            session.process.kill()

    # -- output --------------------------------------------------------------------------------------------------------

    def _send_due(self) -> None:
        if self.session is not None and self.session.is_ready:
            self._send(self.ledger.due_commands(monotonic()))

    def _send(self, commands: Sequence[ToWorker]) -> None:
        if self.session is not None and self.session.is_ready:
            for command in commands:
                self.session.process.send(command)

    def _emit(self, events: list[RequestEvent]) -> None:
        if events:
            self._listener(events)
            self._update_idle()

    def _update_idle(self) -> None:
        if not self.ledger.entries:
            self._idle.set()


async def _wait_for(timeout_s: float, event: asyncio.Event) -> None:
    """Wait for the event, at most `timeout_s` seconds."""
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(event.wait(), timeout_s)


_PERMANENT_ERRORS: dict[str, type[CheckpointError | ConfigError]] = {
    kind.__name__: kind for kind in (CheckpointError, ConfigError)
}
