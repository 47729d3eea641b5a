"""The parent's side of a worker: spawn, watch, replace, and ask again what a dead one owed.

    spawn ─► load ─► serve ─► gone ─┬─► spawn again, at once if the last life brought anything, else later and later
                                    └─► after too many lives that brought nothing: give up, and tell everybody

To a front it is a port like the thread that steps in process, only that it survives its engine. It decides nothing
about requests: that is the ledger's business. It lives on one event loop, the one that spawned it.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from time import monotonic

import zmq
import zmq.asyncio

from quire.core.digests import Namespace
from quire.core.events import RequestEvent
from quire.core.request import Request
from quire.core.share_types import LEAST_PROMISED
from quire.engine.port import Answered, Listener, OnFailure, Told
from quire.errors import (
    CheckpointError,
    ConfigError,
    DrainingError,
    EngineDeadError,
    MessageError,
    QueueFullError,
    QuireError,
)
from quire.worker.handle import COMMAND, WorkerProcess
from quire.worker.ledger import Ledger
from quire.worker.messages import (
    ClearCache,
    Close,
    Explain,
    Explained,
    Failed,
    Load,
    Open,
    Progress,
    Ready,
    Refused,
    Stepped,
    Taken,
    ToParent,
    ToWorker,
)
from quire.worker.shared_status import Flight
from quire.worker.step_sizes import StepSizes

log = logging.getLogger("quire.worker")

TICK_S = 0.1
"""How often the beat and held deadlines are looked at."""
LATE_S = 2.0
"""A look that comes later than this after the one before was not ours to make: the whole container stood still, and the
worker with it."""
QUIET_S = 0.03
"""After a worker's end its last words are heard until none has come for this long."""


@dataclass(frozen=True, slots=True)
class Limits:
    """When a worker counts as stuck, and when as hopeless."""

    stuck_s: float = 30.0
    """A step may take this long."""
    beat_s: float = 4.5
    """A worker whose loop has not come round for this long is not ready: before five seconds are over."""
    max_fruitless: int = 5
    """So many lives in a row that brought nothing, and it is given up."""
    load_s: float = 900.0
    """A worker that loads may be silent for this long."""
    close_s: float = 5.0
    """A worker that was told to close may take this long."""
    first_delay_s: float = 0.25
    max_delay_s: float = 30.0

    def delay_s(self, num_fruitless: int) -> float:
        """How long to wait before the next life."""
        return min(self.max_delay_s, self.first_delay_s * 2 ** (num_fruitless - 1)) if num_fruitless else 0.0


@dataclass(frozen=True, slots=True)
class WorkerPlan:
    """Everything a life needs."""

    open: Open
    limits: Limits = field(default_factory=Limits)
    command: Sequence[str] = COMMAND
    environment: Mapping[str, str] = field(default_factory=dict)
    progress: Callable[[str, int, int], None] = lambda _label, _done, _total: None


class State(Enum):
    """What the supervisor is at."""

    LOADING = "loading"
    READY = "ready"
    RESTARTING = "restarting"
    DRAINING = "draining"
    CLOSED = "closed"
    DEAD = "dead"


@dataclass(slots=True)
class _Life:
    """One worker, and what is known of why it ends."""

    process: WorkerProcess
    heard_s: float
    is_ready: bool = False
    num_heard: int = 0
    reason: str = "died"
    error: QuireError | None = None


@dataclass(frozen=True, slots=True)
class _Ending:
    """Why a worker ended, who was in flight, and what a caller who waits for the first one should be told."""

    reason: str
    request_ids: tuple[str, ...] = ()
    error: QuireError | None = None
    was_ready: bool = False


class Supervisor:
    """Keeps one model's worker alive, and its clients unaware of how often that took a new one."""

    def __init__(self, plan: WorkerPlan, listener: Listener, failed: OnFailure) -> None:
        self._plan = plan
        self._context = zmq.asyncio.Context()
        self._max_open = plan.open.queue.max_requests + plan.open.settings.max_running
        self._listener = listener
        self._failed = failed
        self._ledger = Ledger()
        self._explains: dict[int, Told] = {}
        """Who waits for an answer about the cache. Bounded by the front, which asks."""
        self._num_explains = 0
        self._life: _Life | None = None
        self._ready: asyncio.Future[Ready] | None = None
        self._idle = asyncio.Event()
        self._closing = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._awake_since_s = monotonic()
        self.state = State.LOADING
        self.num_restarts = 0
        self.load = Load()
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

    @property
    def is_ready(self) -> bool:
        """A worker is there, and its loop came round a moment ago."""
        life = self._life
        if self.state is not State.READY or life is None or not life.is_ready:
            return False
        return monotonic() - life.process.flight().beat_s < self._plan.limits.beat_s

    @property
    def pid(self) -> int | None:
        """The worker's process, if there is one."""
        return None if self._life is None else self._life.process.pid

    @property
    def num_open(self) -> int:
        """Requests that have not had their last event."""
        return len(self._ledger.entries)

    @property
    def num_steps_forward(self) -> int:
        """Tokens that came and requests that ended, since the start."""
        return self._ledger.num_steps_forward

    @property
    def num_lost_trials(self) -> int:
        """Times a request was alone when its worker died of it: each is the end of that request."""
        return self._ledger.num_lost_trials

    def flight(self) -> Flight:
        """What the worker is at. Raises EngineDeadError if there is none."""
        if self._life is None:
            raise EngineDeadError("there is no worker at this moment; wait until one is ready")
        return self._life.process.flight()

    async def drain(self, timeout_s: float) -> bool:
        """Take nothing new and wait until what runs has ended; false if it has not in time."""
        if self.state in (State.LOADING, State.READY, State.RESTARTING):
            self.state = State.DRAINING
        self._look_idle()
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        except TimeoutError:
            return False
        return self.state is not State.DEAD

    async def close(self) -> None:
        """End the worker: kindly if it listens, and what still runs is broken off."""
        self.state = State.DEAD if self.state is State.DEAD else State.CLOSED
        self._closing.set()
        life = self._life
        if life is not None and not life.process.gone.is_set():
            if life.is_ready:
                life.process.send(Close())
                await _within(self._plan.limits.close_s, life.process.gone)
            life.process.kill()
        await asyncio.gather(*self._tasks)
        self._context.destroy(linger=0)

    # -- a port --------------------------------------------------------------------------------------------------------

    def submit(self, request: Request, answered: Answered) -> None:
        """Queue a request; `answered` gets None, or why it was refused."""
        try:
            self._check_room(request)
        except QuireError as error:
            answered(error)
            return
        self._ledger.add(request, answered)
        self._idle.clear()
        self._send_due()

    def cancel(self, request_id: str, index: int | None = None) -> None:
        """End a request, or one of its answers alone, if it lives."""
        ledger, now_s = self._ledger, monotonic()
        commands, events = (
            ledger.cancel(request_id, now_s) if index is None else ledger.cancel_answer(request_id, index, now_s)
        )
        self._send(commands)
        self._tell(events)
        self._send_due()

    def explain(self, namespace: Namespace, prompt: tuple[int, ...], told: Told) -> None:
        """Ask why a prompt is not in the cache. A worker that dies takes the question with it: the asker is told."""
        if self._life is None or not self._life.is_ready:
            told(EngineDeadError("there is no worker at this moment; ask again when one is ready"))
            return
        self._num_explains += 1
        self._explains[self._num_explains] = told
        self._send([Explain(self._num_explains, namespace, prompt)])

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
        # promised a place, are here beside them: as many again, or a few hundred.
        num_own, most = self._ledger.num_open_of[request.tenant], self._max_open + max(self._max_open, LEAST_PROMISED)
        if num_own >= self._max_open and not request.is_promised:
            raise QueueFullError(num_own, self._max_open)
        if self.num_open >= most:
            raise QueueFullError(self.num_open, most)

    # -- one worker after the other ------------------------------------------------------------------------------------

    async def _run(self) -> None:
        """One life after the other; however that ends, everybody who waits is told."""
        error: QuireError = EngineDeadError("the worker was closed")
        try:
            error = await self._lives()
        except Exception as bug:
            log.exception("the supervisor of a worker has failed")
            error = EngineDeadError(f"the supervisor failed: {bug!r}")
        finally:
            self._end(error)

    async def _lives(self) -> QuireError:
        """Why no other worker is to be spawned."""
        num_fruitless = 0
        while not self._closing.is_set():
            num_before = self._ledger.num_steps_forward
            ending = await self._live_once()
            self._drop_explains()
            is_idle = ending.was_ready and not self._ledger.entries
            has_moved = self._ledger.num_steps_forward > num_before
            self._tell(self._ledger.crash(ending.request_ids, monotonic()))
            has_moved = has_moved or self._ledger.num_steps_forward > num_before
            num_fruitless = 0 if is_idle or has_moved else num_fruitless + 1
            if self._closing.is_set():
                break
            if ending.error is not None and self._ready is not None and not self._ready.done():
                return ending.error  # the model or a setting is at fault: trying again does not help
            if num_fruitless >= self._plan.limits.max_fruitless:
                return EngineDeadError(f"{num_fruitless} workers in a row brought nothing; the last: {ending.reason}")
            log.warning("%s; a new one is started", ending.reason)
            self.num_restarts += 1
            self.state = State.RESTARTING if self.state is State.READY else self.state
            await _within(self._plan.limits.delay_s(num_fruitless), self._closing)
        return EngineDeadError("the worker was closed")

    def _end(self, error: QuireError) -> None:
        """There will be no other worker: the one way out of here."""
        if self._ready is not None and not self._ready.done():
            self._ready.set_exception(error)
        self._ledger.abandon(error)
        self._drop_explains()
        self._look_idle()
        self._context.destroy(linger=0)
        if not self._closing.is_set():
            log.error("%s", error)
            self.state = State.DEAD
            self._closing.set()
            self._failed(error)

    async def _live_once(self) -> _Ending:
        """One worker from its spawning to its end."""
        try:
            process = WorkerProcess(self._context, self._max_open, self._plan.command, self._plan.environment)
        except (OSError, zmq.ZMQError) as error:
            return _Ending(f"no worker could be spawned: {error}")
        except QuireError as error:
            return _Ending(f"no worker could be spawned: {error}", error=error)
        self._life = life = _Life(process, monotonic())
        process.send(self._plan.open)
        listening = asyncio.create_task(self._listen(life))
        gone = asyncio.create_task(process.gone.wait())
        try:
            await asyncio.wait([listening, gone], return_when=asyncio.FIRST_COMPLETED)
            await _last_words(life, listening)
            return self._ending(life, listening)
        finally:
            self._life = None
            for task in (listening, gone):
                task.cancel()
            code = await process.close()
            log.info("worker %d has ended with code %d", process.pid, code)

    def _ending(self, life: _Life, listening: "asyncio.Task[None]") -> _Ending:
        lie = listening.exception() if listening.done() else None
        if lie is not None:
            # What it says cannot be trusted, and who is behind it cannot be told: all it had count as in flight.
            reason = f"worker {life.process.pid} said what cannot be: {lie}"
            return _Ending(reason, self._ledger.names_sent(), was_ready=life.is_ready)
        names = life.process.flight().request_ids
        return _Ending(f"worker {life.process.pid} {life.reason}", names, life.error, life.is_ready)

    async def _listen(self, life: _Life) -> None:
        while True:
            message = await life.process.receive()
            life.heard_s = monotonic()
            life.num_heard += 1
            self._hear(life, message)
            self._send_due()
            self._look_idle()
            # A message that is there already does not make us wait; everybody else on this loop wants a turn too.
            await asyncio.sleep(0)

    def _hear(self, life: _Life, message: ToParent) -> None:
        match message:
            case Stepped():
                self.load = message.load
                self.step_sizes.take(message.load.step_tokens)
                self._take(message)
            case Taken(request_id):
                self._ledger.taken(request_id)
            case Refused(request_id):
                self._tell(self._ledger.refused(request_id, message.error, life.heard_s))
            case Explained(explain_id, found):
                self._told(explain_id)(found)
            case Progress(label, done_bytes, total_bytes):
                self._plan.progress(label, done_bytes, total_bytes)
            case Ready():
                self._begin(life, message)
            case Failed(kind, text):
                life.reason = f"failed: {kind}: {text}"
                life.error = _PERMANENT[kind](text) if kind in _PERMANENT else None

    def _told(self, explain_id: int) -> Told:
        told = self._explains.pop(explain_id, None)
        if told is None:
            raise MessageError(f"the worker answers question {explain_id} about its cache, which nobody asked")
        return told

    def _drop_explains(self) -> None:
        """Not asked again of the next worker: its cache is another one, and what ended this one may be the question."""
        asked, self._explains = self._explains, {}
        for told in asked.values():
            told(EngineDeadError("the worker ended while it was asked about its cache; ask again"))

    def _take(self, message: Stepped) -> None:
        told: list[RequestEvent] = []
        try:
            self._ledger.take(message.events, message.first_passes, told)
        finally:
            self._tell(told)

    def _begin(self, life: _Life, ready: Ready) -> None:
        life.is_ready = True
        self._ledger.vocabulary_size = ready.vocabulary_size
        if self.state in (State.LOADING, State.RESTARTING):
            self.state = State.READY
        log.info("worker %d is ready; %d requests go on", life.process.pid, self.num_open)
        if self._ready is not None and not self._ready.done():
            self._ready.set_result(ready)

    async def _watch(self) -> None:
        """Kill a worker whose loop does not come round; end who is held too long. After a pause of our own, the worker
        gets all its time anew."""
        last_s = monotonic()
        while not self._closing.is_set():
            now_s = monotonic()
            if now_s - last_s > LATE_S:
                self._awake_since_s = now_s
            last_s = now_s
            self._tell(self._ledger.expire(now_s))
            if self._life is not None:
                self._look_at(self._life, now_s)
            await _within(TICK_S, self._closing)

    def _look_at(self, life: _Life, now_s: float) -> None:
        limits = self._plan.limits
        last_sign_s = life.process.flight().beat_s if life.is_ready else life.heard_s
        since_s = max(last_sign_s, self._awake_since_s)
        limit_s = limits.stuck_s if life.is_ready else limits.load_s
        if now_s - since_s > limit_s:
            where = "in a step" if life.is_ready else "while loading"
            life.reason = f"was stuck {where} for more than {limit_s:g} s and was killed"
            life.process.kill()

    # -- what is said to whom ------------------------------------------------------------------------------------------

    def _send_due(self) -> None:
        if self._life is not None and self._life.is_ready:
            self._send(self._ledger.due())

    def _send(self, commands: Sequence[ToWorker]) -> None:
        if self._life is not None and self._life.is_ready:
            for command in commands:
                self._life.process.send(command)

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


async def _last_words(life: _Life, listening: "asyncio.Task[None]") -> None:
    """A dead worker's messages may still be on their way."""
    num_heard = -1
    while num_heard != life.num_heard and not listening.done():
        num_heard = life.num_heard
        await asyncio.sleep(QUIET_S)


_PERMANENT: dict[str, Callable[[str], QuireError]] = {"CheckpointError": CheckpointError, "ConfigError": ConfigError}
