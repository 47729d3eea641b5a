"""The loop that steps an engine, and the thread that runs it in this process. A worker runs the same loop.

    next command … ─► [ obey · step · tell ] ─► events, once for what was said and once for each step

An idle loop waits for a command. What goes wrong in a step is a bug or the end of the device: the loop ends with it and
nothing is retried here. A command that comes too late for a step is refused, never forgotten.
"""

import threading
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from time import monotonic
from typing import Protocol

from quire.core.events import Refused, RequestEvent
from quire.core.inspect.block_facts import facts_of_block
from quire.core.inspect.snapshots import EngineSnapshot
from quire.core.request import Request
from quire.core.scheduling.shares import AdmissionHint
from quire.engine.calls import (
    BlockInfo,
    CallOp,
    CallReply,
    CallResult,
    EngineCall,
    Explain,
    Explained,
    OnReply,
    PendingCalls,
)
from quire.engine.commands import Cancel, ClearCache, Close, Command, Restore, StartSnapshots, StopSnapshots, Submit
from quire.engine.engine import Clock, Engine
from quire.engine.port import Listener, OnFailure, WorkerRecord
from quire.errors import EngineDeadError

STOPPED = "the engine has stopped; start it again"


class LoopHost(Protocol):
    """Where a loop's commands come from, and where what happened goes."""

    def next_command(self, *, waits: bool) -> Command | None:
        """The next one, or None if there is none; `waits` says that there is nothing to do meanwhile."""
        ...

    def began(self, request_ids: list[str]) -> None:
        """These are about to be looked at or computed."""
        ...

    def send(self, events: Sequence[RequestEvent]) -> None:
        """What commands or a step brought, perhaps nothing."""
        ...

    def show(self, snapshot: EngineSnapshot) -> None:
        """The engine at this moment, for those who watch."""
        ...

    def reply(self, reply: CallReply) -> None:
        """The reply to a call."""
        ...


def run_loop(engine: Engine, host: LoopHost, clock: Clock = monotonic) -> None:
    """Obey and step until `Close`."""
    is_open = True
    while is_open:
        events: list[RequestEvent] = []
        is_open = _obey_all(engine, host, clock, events)
        if events:  # before the step, which may take long; and before the end, which may be now
            host.send(events)
        if is_open:
            host.send(engine.step(clock, host.began))
        if engine.watch is not None and not engine.has_work:
            engine.watch.work(clock)


def _obey_all(engine: Engine, host: LoopHost, clock: Clock, events: list[RequestEvent]) -> bool:
    """Carry out all commands that are there, and add what came of them; false after the last one there will be."""
    while (command := host.next_command(waits=not engine.has_work and not events)) is not None:
        match command:
            case Submit() | Restore():
                host.began([command.request_id])
                events += engine.enter(command.received(clock()), is_restored=isinstance(command, Restore))
            case Cancel(request_id, index):
                engine.cancel(request_id, index)
            case EngineCall(call_id, op):
                host.reply(CallReply(call_id, _result(engine, op, clock())))
            case ClearCache():
                engine.clear()
            case StartSnapshots(period_s):
                engine.begin_watch(period_s, host.show)
            case StopSnapshots():
                engine.end_watch()
            case Close():
                return False
    return True


def _result(engine: Engine, op: CallOp, now_s: float) -> CallResult:
    if isinstance(op, Explain):
        return Explained(engine.explain(op.namespace, op.prompt, now_s))
    return BlockInfo(facts_of_block(engine.memory, engine.scheduler.running, op.block_id, now_s))


class ThreadWatch:
    """Looks at an engine through the queue of the thread that steps it."""

    workers: Sequence[WorkerRecord] = ()

    def __init__(self, put: Callable[[Command], object]) -> None:
        self._put = put
        self.show: Callable[[EngineSnapshot], None] = _noop

    def watch(self, show: Callable[[EngineSnapshot], None], period_s: float) -> None:
        """Show a snapshot so often."""
        self.show = show
        self._put(StartSnapshots(period_s))

    def unwatch(self) -> None:
        """Stop the snapshots."""
        self.show = _noop
        self._put(StopSnapshots())


def _noop(_snapshot: EngineSnapshot) -> None:
    """Discard a snapshot that was made after the watch ended."""


class EngineThread:
    """A port to an engine that a thread of its own steps, from `start` to `close`.

    The listener runs on that thread, or on the caller's, and must return at once.
    """

    def __init__(self, engine: Engine, listener: Listener, failed: OnFailure) -> None:
        self._engine = engine
        self._listener = listener
        self._failed = failed
        self.commands: SimpleQueue[Command] = SimpleQueue()
        self._lock = threading.Lock()
        self.watching = ThreadWatch(self._try_put)
        self._calls = PendingCalls()
        self.verdicts: Sequence[AdmissionHint] = ()
        self._is_over = False
        """Guarded by the lock: once true, no command is put into the queue."""
        self.thread = threading.Thread(target=self._run, name="quire-steps", daemon=True)

    def start(self) -> None:
        """Begin to step."""
        self.thread.start()

    def submit(self, request: Request) -> None:
        """Queue a request: `Queued` or `Refused` is its first event."""
        if not self._try_put(Submit.sent(request, monotonic())):
            self._listener([Refused.of(request.request_id, EngineDeadError(STOPPED))])

    def call(self, op: CallOp, on_reply: OnReply) -> None:
        """Query the engine between two steps."""
        if not self._try_put(self._calls.open(op, on_reply)):
            self._calls.fail_all(EngineDeadError(STOPPED))

    def cancel(self, request_id: str, index: int | None = None) -> None:
        """End a request, or one of its answers alone, if it lives."""
        self.commands.put(Cancel(request_id, index))

    def clear_cache(self) -> None:
        """Forget every cached block that is not in use."""
        self.commands.put(ClearCache())

    def close(self) -> None:
        """Stop after the step in flight, and wait for it."""
        self.commands.put(Close())
        self.thread.join()

    def _try_put(self, command: Command) -> bool:
        with self._lock:
            if not self._is_over:
                self.commands.put(command)
            return not self._is_over

    # -- on its own thread ---------------------------------------------------------------------------------------------

    def next_command(self, *, waits: bool) -> Command | None:
        """The next one, or None if there is none and there is something else to do."""
        watch = self._engine.watch
        try:
            return self.commands.get(waits, None if watch is None else watch.due_in(monotonic()))
        except Empty:
            return None

    def began(self, request_ids: list[str]) -> None:
        """Not needed: what ends this thread ends the engine."""

    def show(self, snapshot: EngineSnapshot) -> None:
        """For those who watch."""
        self.watching.show(snapshot)

    def reply(self, reply: CallReply) -> None:
        """For the caller that waits for it."""
        self._calls.resolve(reply)

    def send(self, events: Sequence[RequestEvent]) -> None:
        """Pass on what there is."""
        if events:
            shares = self._engine.scheduler.queue.shares
            self.verdicts = shares.update_hints() if shares.refused else ()
            self._listener(events)

    def _run(self) -> None:
        try:
            run_loop(self._engine, self)
        except BaseException as error:
            self._failed(error)
        finally:
            self._refuse_the_rest()
            self._engine.close()

    def _refuse_the_rest(self) -> None:
        with self._lock:
            self._is_over = True
        error = EngineDeadError("the engine stopped before it received this request; send it again")
        while (command := self.next_command(waits=False)) is not None:
            if isinstance(command, Submit):
                self._listener([Refused.of(command.request_id, error)])
        self._calls.fail_all(error)
