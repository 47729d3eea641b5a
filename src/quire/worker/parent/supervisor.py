"""The parent's side of a worker: spawn, watch, replace, and resubmit the requests of a dead one.

    spawn ─► load ─► serve ─► gone ─┬─► spawn again, at once if the last worker made progress, else with growing delays
                                    └─► after too many workers without progress: give up, and refuse all requests

To a client it is a port like the thread that steps in process, only that it survives its engine. It decides nothing
about requests: the ledger does. It lives on one event loop, the one that spawned it.
"""

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from enum import Enum
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
from quire.worker.child.shared_status import Flight
from quire.worker.messages import Failed, LoadProgress, Ready, SnapshotMade, Stepped, ToParent, ToWorker, WorkerLoad
from quire.worker.parent.handle import WorkerProcess
from quire.worker.parent.ledger import Ledger
from quire.worker.parent.session import SessionEnd, WorkerSession
from quire.worker.parent.spawned_worker import SpawnedWorker
from quire.worker.parent.step_sizes import StepSizes
from quire.worker.parent.worker_plan import WorkerPlan
from quire.worker.parent.worker_watch import WorkerWatch

log = logging.getLogger("quire.worker")

TICK_S = 0.1
"""How often beats and deadlines of held requests are checked."""
NOT_READY = "no worker is ready; retry when one is"
LATE_S = 2.0
"""A check this late after the one before: the whole container was suspended, and the worker with it."""


class State(Enum):
    """The state of a supervisor."""

    LOADING = "loading"
    READY = "ready"
    RESTARTING = "restarting"
    DRAINING = "draining"
    CLOSED = "closed"
    FAILED = "failed"


class Supervisor:
    """Keeps one model's worker alive, and replaces it without its clients noticing."""

    def __init__(
        self, plan: WorkerPlan, listener: Listener, failed: OnFailure, first: SpawnedWorker | None = None
    ) -> None:
        """`first`: a worker that was spawned already, for the first life."""
        self._plan = plan
        self._first = first
        self._context = zmq.asyncio.Context()
        self._max_open = plan.open.queue.max_requests + plan.open.settings.max_running
        self._listener = listener
        self._failed = failed
        self.ledger = Ledger()
        self._calls = PendingCalls()
        self.watching = WorkerWatch(self._send)
        self.session: WorkerSession | None = None
        self._ready: asyncio.Future[Ready] | None = None
        self._idle = asyncio.Event()
        self._closing = asyncio.Event()
        self._may_live = asyncio.Event()
        """Not set: open requests are set aside, and no worker is spawned."""
        self._may_live.set()
        self._is_away = asyncio.Event()
        """Set aside, and no worker is left."""
        self.open_sent = asyncio.Event()
        """Set once a worker has its model's name, or none will come: the parent should do nothing else before."""
        self._tasks: list[asyncio.Task[None]] = []
        self._awake_since_s = monotonic()
        self.state = State.LOADING
        self.num_restarts = 0
        self._load = WorkerLoad()
        self._num_computed_shown = 0
        self.verdicts: Sequence[AdmissionHint] = ()
        self.step_sizes = StepSizes()

    # -- life ----------------------------------------------------------------------------------------------------------

    async def start(self) -> Ready:
        """Spawn a worker and wait until its model is loaded. Raises CheckpointError, ConfigError or EngineDeadError."""
        self._ready = asyncio.get_running_loop().create_future()
        self._ready.add_done_callback(lambda ready: ready.cancelled() or ready.exception())  # may never be awaited
        self._tasks = [
            asyncio.create_task(self._run(), name="quire-supervisor"),
            asyncio.create_task(self._watch(), name="quire-watch"),
        ]
        return await asyncio.shield(self._ready)

    async def set_aside(self) -> None:
        """End the worker and spawn no other: open requests are held, and continue when `go_on` has brought one."""
        self._may_live.clear()
        if self.session is not None:
            self.session.reason = "was ended; what it answered is set aside"
            self.session.process.kill()
        await self._is_away.wait()

    async def go_on(self) -> None:
        """Spawn a worker again and wait until its model is loaded. Raises what `start` does."""
        if self._closing.is_set():
            raise EngineDeadError("the worker failed and is not restarted; restart the server")
        self._ready = asyncio.get_running_loop().create_future()
        self._ready.add_done_callback(lambda ready: ready.cancelled() or ready.exception())
        self._is_away.clear()
        self._may_live.set()
        await asyncio.shield(self._ready)

    @property
    def is_ready(self) -> bool:
        """There is a worker that is not known to be stuck. However long its step is: new requests are served
        after it."""
        session = self.session
        if self.state not in (State.READY, State.DRAINING) or session is None or not session.is_ready:
            return False
        now_s = monotonic()
        return not session.is_silent(now_s, self._plan.limits.silent_s)

    @property
    def step_s(self) -> float:
        """For how long the step in flight has run; 0: none does."""
        session = self.session
        return 0.0 if session is None or not session.is_ready else session.step_in_flight(monotonic())[1]

    @property
    def load(self) -> WorkerLoad:
        """As the worker sent it last, with the part of the step in flight that is computed by now."""
        session, computed = self.session, self._load.num_computed_tokens
        step = None if session is None or not session.is_ready else session.step_in_flight(monotonic())[0]
        if step is not None:
            computed += int(step.share * step.num_tokens)
        # The end of a step is seen before its load has come: a number once shown never decreases.
        self._num_computed_shown = max(computed, self._num_computed_shown)
        return msgspec.structs.replace(self._load, num_computed_tokens=self._num_computed_shown)

    @property
    def pid(self) -> int | None:
        return None if self.session is None else self.session.process.pid

    @property
    def num_open(self) -> int:
        return len(self.ledger.entries)

    @property
    def num_progress(self) -> int:
        """Tokens that came and requests that ended, since the start."""
        return self.ledger.num_progress

    @property
    def num_quarantined(self) -> int:
        """Times a request was alone when its worker died of it: each is the end of that request."""
        return self.ledger.num_quarantined

    def flight(self) -> Flight:
        """The worker's status. Raises EngineDeadError if there is none."""
        if self.session is None:
            raise EngineDeadError(NOT_READY)
        return self.session.process.flight()

    async def drain(self, timeout_s: float) -> bool:
        """Take nothing new and wait until open requests have ended; false on timeout."""
        if self.state in (State.LOADING, State.READY, State.RESTARTING):
            self.state = State.DRAINING
        self._look_idle()
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        except TimeoutError:
            return False
        return self.state is not State.FAILED

    async def close(self) -> None:
        """End the worker: gracefully if it is ready; open requests are cut off."""
        self.state = State.FAILED if self.state is State.FAILED else State.CLOSED
        self._closing.set()
        self._may_live.set()
        session = self.session
        if session is not None and not session.process.gone.is_set():
            if session.is_ready:
                session.process.send(Close())
                await _within(self._plan.limits.close_s, session.process.gone)
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
        """Query the worker. If it exits first, the call fails."""
        if self.session is None or not self.session.is_ready:
            on_reply(EngineDeadError(NOT_READY))
            return
        self._send([self._calls.open(op, on_reply)])

    def clear_cache(self) -> None:
        """Drop every unused cached block."""
        self._send([ClearCache()])

    def _check_room(self, request: Request) -> None:
        if self._closing.is_set():
            raise EngineDeadError("the worker failed and is not restarted; restart the server")
        if self.state is State.DRAINING:
            raise DrainingError(
                "the server is shutting down and takes no new requests; use another one, or retry later"
            )
        # The worker's own queue decides about classes and shares; but it may be stuck, on trial or absent, and then no
        # more may wait here than it would ever take of one tenant. Requests that others will displace, and those with a
        # reservation or begun elsewhere, are here beside them: as many again, or a few hundred.
        num_own, most = self.ledger.num_open_of[request.tenant], self._max_open + max(self._max_open, MIN_RESERVED)
        if num_own >= self._max_open and not request.has_reservation and not request.has_begun:
            raise QueueFullError(num_own, self._max_open)
        if self.num_open >= most:
            raise QueueFullError(self.num_open, most)

    # -- one worker after the other ------------------------------------------------------------------------------------

    async def _run(self) -> None:
        """One worker after the other; however that ends, all waiting requests get their refusal."""
        error: QuireError = EngineDeadError("the worker was closed")
        try:
            error = await self._sessions()
        except Exception as bug:
            log.exception("the supervisor of a worker has failed")
            error = EngineDeadError(f"the supervisor failed: {bug!r}", code="supervisor_failed")
        finally:
            self._end(error)

    async def _sessions(self) -> QuireError:
        """Why no other worker is to be spawned."""
        num_without_progress = 0
        while not self._closing.is_set():
            if not self._may_live.is_set():
                self.state = State.LOADING if self.state in (State.READY, State.RESTARTING) else self.state
                self._is_away.set()
                await self._may_live.wait()
                continue
            num_before = self.ledger.num_progress
            self.watching.began()
            ending = await self._live_once()
            self.watching.ended(ending.reason)
            self._calls.fail_all(EngineDeadError("the worker exited during a cache query; retry"))
            if not self._may_live.is_set():
                self._emit(self.ledger.set_aside())
                continue
            is_idle = ending.was_ready and not self.ledger.entries
            has_moved = self.ledger.num_progress > num_before
            self._emit(self.ledger.crash(ending.request_ids))
            has_moved = has_moved or self.ledger.num_progress > num_before
            num_without_progress = 0 if is_idle or has_moved else num_without_progress + 1
            if self._closing.is_set():
                break
            if ending.error is not None and self._ready is not None and not self._ready.done():
                return ending.error  # the model or a setting is at fault: another attempt does not help
            if num_without_progress >= self._plan.limits.max_restarts_without_progress:
                rule = f"giving up: {num_without_progress} consecutive workers made no progress; last: {ending.reason}"
                return EngineDeadError(rule, code="workers_made_no_progress")
            log.warning("%s; starting a new one", ending.reason)
            self.num_restarts += 1
            self.state = State.RESTARTING if self.state is State.READY else self.state
            await _within(self._plan.limits.delay_s(num_without_progress), self._closing)
        return EngineDeadError("the worker was closed")

    def _end(self, error: QuireError) -> None:
        """There will be no other worker: the one way out of here."""
        self.open_sent.set()
        self._is_away.set()
        if self._ready is not None and not self._ready.done():
            self._ready.set_exception(error)
        self._emit(self.ledger.abandon(error))
        self._calls.fail_all(error)
        self._look_idle()
        self._context.destroy(linger=0)
        if not self._closing.is_set():
            log.error("%s", error)
            self.state = State.FAILED
            self._closing.set()
            self._failed(error)

    async def _live_once(self) -> SessionEnd:
        """One worker from its spawning to its end."""
        plan = self._plan
        first, self._first = self._first, None
        try:
            process = WorkerProcess(self._context, self._max_open, plan.command, plan.environment, first)
        except (OSError, zmq.ZMQError) as error:
            return SessionEnd(f"no worker could be spawned: {error}")
        except QuireError as error:
            return SessionEnd(f"no worker could be spawned: {error}", error=error)
        self.session = session = WorkerSession(process, monotonic())
        process.send(plan.open)
        self.open_sent.set()
        try:
            return await session.run(lambda message: self._on_message(session, message), self.ledger.names_sent)
        finally:
            self.session = None
            code = await process.close()
            level = logging.DEBUG if self._closing.is_set() else logging.INFO  # we ended it
            log.log(level, "worker %d has ended with code %d", process.pid, code)

    def _on_message(self, session: WorkerSession, message: ToParent) -> None:
        self.handle(session, message)
        self._send_due()
        self._look_idle()

    def handle(self, session: WorkerSession, message: ToParent) -> None:
        """One message of this worker."""
        match message:
            case Stepped():
                if message.load is not None:
                    self._load, self.verdicts = message.load, message.load.verdicts
                    self.step_sizes.update(message.load.step_tokens)
                self._take(message)
            case LoadProgress(label, done_bytes, total_bytes):
                self._plan.progress(label, done_bytes, total_bytes)
            case Ready():
                self._begin(session, message)
            case SnapshotMade(snapshot):
                self.watching.show(snapshot)
            case CallReply():
                self._calls.resolve(message)
            case _:
                self._fail(session, message)

    @staticmethod
    def _fail(session: WorkerSession, failed: Failed) -> None:
        session.reason = f"failed: {failed.kind}: {failed.message}"
        permanent = _PERMANENT.get(failed.kind)
        session.error = None if permanent is None else permanent(failed.message, code=failed.code)

    def _take(self, message: Stepped) -> None:
        new_events: list[RequestEvent] = []
        try:
            self.ledger.take(message.events, new_events)
        finally:
            self._emit(new_events)

    def _begin(self, session: WorkerSession, ready: Ready) -> None:
        session.is_ready = True
        self._load, self._num_computed_shown = WorkerLoad(), 0
        self.verdicts = ()  # of a queue that is no more
        self.ledger.vocabulary_size = ready.info.vocabulary_size
        if self.state in (State.LOADING, State.RESTARTING):
            self.state = State.READY
        self.watching.ready()
        log.info("worker %d is ready; resuming %d requests", session.process.pid, self.num_open)
        if self._ready is not None and not self._ready.done():
            self._ready.set_result(ready)

    async def _watch(self) -> None:
        """Kill a worker that makes no progress; end requests that are held too long. After a suspension of this
        process, the worker gets all its time again."""
        last_s = monotonic()
        while not self._closing.is_set():
            now_s = monotonic()
            if now_s - last_s > LATE_S:
                self._awake_since_s = now_s
            last_s = now_s
            self._emit(self.ledger.expire(now_s))
            if self.session is not None:
                self.look_at(self.session, now_s)
            await _within(TICK_S, self._closing)

    def look_at(self, session: WorkerSession, now_s: float) -> None:
        """End a worker that is stuck or silent for too long."""
        limits = self._plan.limits
        last_sign_s = session.last_progress_s(now_s) if session.is_ready else session.last_message_s
        session.step_in_flight(now_s)
        since_s = max(last_sign_s, self._awake_since_s)
        limit_s = limits.stuck_s if session.is_ready else limits.load_s
        if now_s - since_s > limit_s:
            where = "in a step" if session.is_ready else "while loading"
            session.reason = f"was stuck {where} for more than {limit_s:g} s and was killed"
            session.process.kill()

    # -- output --------------------------------------------------------------------------------------------------------

    def _send_due(self) -> None:
        if self.session is not None and self.session.is_ready:
            self._send(self.ledger.due(monotonic()))

    def _send(self, commands: Sequence[ToWorker]) -> None:
        if self.session is not None and self.session.is_ready:
            for command in commands:
                self.session.process.send(command)

    def _emit(self, events: list[RequestEvent]) -> None:
        if events:
            self._listener(events)
            self._look_idle()

    def _look_idle(self) -> None:
        if not self.ledger.entries:
            self._idle.set()


async def _within(timeout_s: float, event: asyncio.Event) -> None:
    """Wait for the event, but no longer than this."""
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(event.wait(), timeout_s)


_PERMANENT: dict[str, type[CheckpointError | ConfigError]] = {
    kind.__name__: kind for kind in (CheckpointError, ConfigError)
}
