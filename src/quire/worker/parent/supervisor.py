"""The parent's side of a worker: spawn, watch, replace, and ask again what a dead one owed.

    spawn ─► load ─► serve ─► gone ─┬─► spawn again, at once if the last life brought anything, else later and later
                                    └─► after too many lives that brought nothing: give up, and tell everybody

To a front it is a port like the thread that steps in process, only that it survives its engine. It decides nothing
about requests: that is the ledger's business. It lives on one event loop, the one that spawned it.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from enum import Enum
from time import monotonic

import msgspec
import zmq
import zmq.asyncio

from quire.core.digests import Namespace
from quire.core.events import Refused, RequestEvent
from quire.core.request import Request
from quire.core.scheduling.shares import LEAST_PROMISED, Verdict
from quire.engine.commands import ClearCache, Close, Explain
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
from quire.worker.messages import (
    BlockTold,
    Failed,
    LoadProgress,
    Ready,
    SnapshotMade,
    Stepped,
    ToParent,
    ToWorker,
    WorkerLoad,
)
from quire.worker.parent.cache_questions import CacheQuestions
from quire.worker.parent.handle import WorkerProcess
from quire.worker.parent.ledger import Ledger
from quire.worker.parent.session import SessionEnd, WorkerSession
from quire.worker.parent.spawned_worker import SpawnedWorker
from quire.worker.parent.step_sizes import StepSizes
from quire.worker.parent.worker_plan import WorkerPlan
from quire.worker.parent.worker_watch import WorkerWatch

log = logging.getLogger("quire.worker")

TICK_S = 0.1
"""How often the beat and held deadlines are looked at."""
LATE_S = 2.0
"""A look that comes later than this after the one before was not ours to make: the whole container stood still, and the
worker with it."""


class State(Enum):
    """What the supervisor is at."""

    LOADING = "loading"
    READY = "ready"
    RESTARTING = "restarting"
    DRAINING = "draining"
    CLOSED = "closed"
    FAILED = "failed"


class Supervisor:
    """Keeps one model's worker alive, and its clients unaware of how often that took a new one."""

    def __init__(
        self, plan: WorkerPlan, listener: Listener, failed: OnFailure, first: SpawnedWorker | None = None
    ) -> None:
        """`first`: a worker that is on its way, for the first life."""
        self._plan = plan
        self._first = first
        self._context = zmq.asyncio.Context()
        self._max_open = plan.open.queue.max_requests + plan.open.settings.max_running
        self._listener = listener
        self._failed = failed
        self._ledger = Ledger()
        self._questions = CacheQuestions()
        self.watching = WorkerWatch(self._send)
        self._session: WorkerSession | None = None
        self._ready: asyncio.Future[Ready] | None = None
        self._idle = asyncio.Event()
        self._closing = asyncio.Event()
        self._may_live = asyncio.Event()
        """Not set: what runs is set aside, and no worker is spawned."""
        self._may_live.set()
        self._is_away = asyncio.Event()
        """Set aside, and no worker is left."""
        self.told_to_open = asyncio.Event()
        """Set once a worker knows what to load, or none will come: its parent has better nothing else to do before."""
        self._tasks: list[asyncio.Task[None]] = []
        self._awake_since_s = monotonic()
        self.state = State.LOADING
        self.num_restarts = 0
        self._load = WorkerLoad()
        self._num_computed_shown = 0
        self.verdicts: Sequence[Verdict] = ()
        self.step_sizes = StepSizes()

    # -- life ----------------------------------------------------------------------------------------------------------

    async def start(self) -> Ready:
        """Spawn a worker and wait until its model is loaded. Raises CheckpointError, ConfigError or EngineDeadError."""
        self._ready = asyncio.get_running_loop().create_future()
        self._ready.add_done_callback(lambda ready: ready.cancelled() or ready.exception())  # nobody may wait for it
        self._tasks = [
            asyncio.create_task(self._run(), name="quire-supervisor"),
            asyncio.create_task(self._watch(), name="quire-watch"),
        ]
        return await asyncio.shield(self._ready)

    async def set_aside(self) -> None:
        """End the worker and spawn no other: what runs is held, and continues when `go_on` has brought one."""
        self._may_live.clear()
        if self._session is not None:
            self._session.reason = "was ended; what it answered is set aside"
            self._session.process.kill()
        await self._is_away.wait()

    async def go_on(self) -> None:
        """Spawn a worker again and wait until its model is loaded. Raises what `start` does."""
        if self._closing.is_set():
            raise EngineDeadError("the worker is gone for good; start the server again")
        self._ready = asyncio.get_running_loop().create_future()
        self._ready.add_done_callback(lambda ready: ready.cancelled() or ready.exception())
        self._is_away.clear()
        self._may_live.set()
        await asyncio.shield(self._ready)

    @property
    def is_ready(self) -> bool:
        """A worker is there and not known to stand still. However long its step is: what comes meanwhile is served
        behind it."""
        session = self._session
        if self.state not in (State.READY, State.DRAINING) or session is None or not session.is_ready:
            return False
        now_s = monotonic()
        return not session.is_silent(now_s, self._plan.limits.silent_s)

    @property
    def step_s(self) -> float:
        """For how long the step in flight has run; 0: none does."""
        session = self._session
        return 0.0 if session is None or not session.is_ready else session.step_in_flight(monotonic())[1]

    @property
    def load(self) -> WorkerLoad:
        """As the worker sent it last, with what of the step in flight is computed by now."""
        session, computed = self._session, self._load.num_computed_tokens
        step = None if session is None or not session.is_ready else session.step_in_flight(monotonic())[0]
        if step is not None:
            computed += int(step.share * step.num_tokens)
        # The end of a step is seen before its load has come: what was shown is never taken back.
        self._num_computed_shown = max(computed, self._num_computed_shown)
        return msgspec.structs.replace(self._load, num_computed_tokens=self._num_computed_shown)

    @property
    def pid(self) -> int | None:
        """The worker's process, if there is one."""
        return None if self._session is None else self._session.process.pid

    @property
    def num_open(self) -> int:
        """Requests that have not had their last event."""
        return len(self._ledger.entries)

    @property
    def num_progress(self) -> int:
        """Tokens that came and requests that ended, since the start."""
        return self._ledger.num_progress

    @property
    def num_quarantined(self) -> int:
        """Times a request was alone when its worker died of it: each is the end of that request."""
        return self._ledger.num_quarantined

    def flight(self) -> Flight:
        """What the worker is at. Raises EngineDeadError if there is none."""
        if self._session is None:
            raise EngineDeadError("there is no worker at this moment; wait until one is ready")
        return self._session.process.flight()

    async def drain(self, timeout_s: float) -> bool:
        """Take nothing new and wait until what runs has ended; false if it has not in time."""
        if self.state in (State.LOADING, State.READY, State.RESTARTING):
            self.state = State.DRAINING
        self._look_idle()
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        except TimeoutError:
            return False
        return self.state is not State.FAILED

    async def close(self) -> None:
        """End the worker: kindly if it listens, and what still runs is broken off."""
        self.state = State.FAILED if self.state is State.FAILED else State.CLOSED
        self._closing.set()
        self._may_live.set()
        session = self._session
        if session is not None and not session.process.gone.is_set():
            if session.is_ready:
                session.process.send(Close())
                await _within(self._plan.limits.close_s, session.process.gone)
            session.process.kill()
        await asyncio.gather(*self._tasks)
        self._context.destroy(linger=0)

    # -- a port --------------------------------------------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        """Queue a request: `Queued` or `Refused` is its first event."""
        try:
            self._check_room(request)
        except QuireError as error:
            self._listener([Refused.of(request.request_id, error)])
            return
        self._ledger.add(request)
        self._idle.clear()
        self._send_due()

    def cancel(self, request_id: str, index: int | None = None) -> None:
        """End a request, or one of its answers alone, if it lives."""
        ledger = self._ledger
        commands, events = ledger.cancel(request_id) if index is None else ledger.cancel_answer(request_id, index)
        self._send(commands)
        self._tell(events)
        self._send_due()

    def explain(self, question_id: str, namespace: Namespace, prompt: tuple[int, ...]) -> None:
        """Ask why a prompt is not in the cache. A worker that dies takes the question with it: the asker is told."""
        if self._session is None or not self._session.is_ready:
            error = EngineDeadError("there is no worker at this moment; ask again when one is ready")
            self._listener([Refused.of(question_id, error)])
            return
        self._questions.add(question_id)
        self._send([Explain(question_id, namespace, prompt)])

    def clear_cache(self) -> None:
        """Forget every cached block that nobody uses."""
        self._send([ClearCache()])

    def _check_room(self, request: Request) -> None:
        if self._closing.is_set():
            raise EngineDeadError("the worker is gone for good; start the server again")
        if self.state is State.DRAINING:
            raise DrainingError("the server is going down and takes no new requests; ask another one, or later")
        # The worker's own queue judges classes and shares; but it may be stuck, on trial or not there, and then no more
        # may wait here than it would ever take of one tenant. Those whom others will displace, and those who were
        # promised a place or begun elsewhere, are here beside them: as many again, or a few hundred.
        num_own, most = self._ledger.num_open_of[request.tenant], self._max_open + max(self._max_open, LEAST_PROMISED)
        if num_own >= self._max_open and not request.is_promised and not request.has_begun:
            raise QueueFullError(num_own, self._max_open)
        if self.num_open >= most:
            raise QueueFullError(self.num_open, most)

    # -- one worker after the other ------------------------------------------------------------------------------------

    async def _run(self) -> None:
        """One life after the other; however that ends, everybody who waits is told."""
        error: QuireError = EngineDeadError("the worker was closed")
        try:
            error = await self._sessions()
        except Exception as bug:
            log.exception("the supervisor of a worker has failed")
            error = EngineDeadError(f"the supervisor failed: {bug!r}")
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
            num_before = self._ledger.num_progress
            self.watching.began()
            ending = await self._live_once()
            self.watching.ended(ending.reason)
            self._tell(self._questions.drop())
            if not self._may_live.is_set():
                self._tell(self._ledger.set_aside())
                continue
            is_idle = ending.was_ready and not self._ledger.entries
            has_moved = self._ledger.num_progress > num_before
            self._tell(self._ledger.crash(ending.request_ids))
            has_moved = has_moved or self._ledger.num_progress > num_before
            num_without_progress = 0 if is_idle or has_moved else num_without_progress + 1
            if self._closing.is_set():
                break
            if ending.error is not None and self._ready is not None and not self._ready.done():
                return ending.error  # the model or a setting is at fault: trying again does not help
            if num_without_progress >= self._plan.limits.max_restarts_without_progress:
                return EngineDeadError(
                    f"{num_without_progress} workers in a row brought nothing; the last: {ending.reason}"
                )
            log.warning("%s; a new one is started", ending.reason)
            self.num_restarts += 1
            self.state = State.RESTARTING if self.state is State.READY else self.state
            await _within(self._plan.limits.delay_s(num_without_progress), self._closing)
        return EngineDeadError("the worker was closed")

    def _end(self, error: QuireError) -> None:
        """There will be no other worker: the one way out of here."""
        self.told_to_open.set()
        self._is_away.set()
        if self._ready is not None and not self._ready.done():
            self._ready.set_exception(error)
        self._tell(self._ledger.abandon(error))
        self._tell(self._questions.drop())
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
        self._session = session = WorkerSession(process, monotonic())
        process.send(plan.open)
        self.told_to_open.set()
        try:
            return await session.run(lambda message: self._on_message(session, message), self._ledger.names_sent)
        finally:
            self._session = None
            code = await process.close()
            level = logging.DEBUG if self._closing.is_set() else logging.INFO  # we ended it
            log.log(level, "worker %d has ended with code %d", process.pid, code)

    def _on_message(self, session: WorkerSession, message: ToParent) -> None:
        self._hear(session, message)
        self._send_due()
        self._look_idle()

    def _hear(self, session: WorkerSession, message: ToParent) -> None:
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
            case SnapshotMade() | BlockTold():
                self.watching.take(message)
            case _:
                self._fail(session, message)

    @staticmethod
    def _fail(session: WorkerSession, failed: Failed) -> None:
        session.reason = f"failed: {failed.kind}: {failed.message}"
        permanent = _PERMANENT.get(failed.kind)
        session.error = None if permanent is None else permanent(failed.message)

    def _take(self, message: Stepped) -> None:
        told: list[RequestEvent] = []
        try:
            events: Sequence[RequestEvent] = message.events
            if self._questions.open:
                events = self._questions.take(events, told)
            self._ledger.take(events, told)
        finally:
            self._tell(told)

    def _begin(self, session: WorkerSession, ready: Ready) -> None:
        session.is_ready = True
        self._load, self._num_computed_shown = WorkerLoad(), 0
        self.verdicts = ()  # of a queue that is no more
        self._ledger.vocabulary_size = ready.info.vocabulary_size
        if self.state in (State.LOADING, State.RESTARTING):
            self.state = State.READY
        self.watching.ready()
        log.info("worker %d is ready; %d requests go on", session.process.pid, self.num_open)
        if self._ready is not None and not self._ready.done():
            self._ready.set_result(ready)

    async def _watch(self) -> None:
        """Kill a worker that makes no progress; end who is held too long. After a pause of our own, the worker gets all
        its time anew."""
        last_s = monotonic()
        while not self._closing.is_set():
            now_s = monotonic()
            if now_s - last_s > LATE_S:
                self._awake_since_s = now_s
            last_s = now_s
            self._tell(self._ledger.expire(now_s))
            if self._session is not None:
                self._look_at(self._session, now_s)
            await _within(TICK_S, self._closing)

    def _look_at(self, session: WorkerSession, now_s: float) -> None:
        limits = self._plan.limits
        last_sign_s = session.last_progress_s(now_s) if session.is_ready else session.heard_s
        session.step_in_flight(now_s)
        since_s = max(last_sign_s, self._awake_since_s)
        limit_s = limits.stuck_s if session.is_ready else limits.load_s
        if now_s - since_s > limit_s:
            where = "in a step" if session.is_ready else "while loading"
            session.reason = f"was stuck {where} for more than {limit_s:g} s and was killed"
            session.process.kill()

    # -- what is said to whom ------------------------------------------------------------------------------------------

    def _send_due(self) -> None:
        if self._session is not None and self._session.is_ready:
            self._send(self._ledger.due(monotonic()))

    def _send(self, commands: Sequence[ToWorker]) -> None:
        if self._session is not None and self._session.is_ready:
            for command in commands:
                self._session.process.send(command)

    def _tell(self, events: list[RequestEvent]) -> None:
        if events:
            self._listener(events)
            self._look_idle()

    def _look_idle(self) -> None:
        if not self._ledger.entries:
            self._idle.set()


async def _within(timeout_s: float, event: asyncio.Event) -> None:
    """Wait for the event, but no longer than this."""
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(event.wait(), timeout_s)


_PERMANENT: dict[str, Callable[[str], QuireError]] = {"CheckpointError": CheckpointError, "ConfigError": ConfigError}
