"""The loop that steps an engine, and the thread that runs the loop in this process. A worker runs the same loop.

    next command … ─► [ execute · step · send ] ─► events, sent once for the commands and once for each step

An idle loop waits for a command. An exception in a step is a bug or a device failure: it ends the loop, without a
retry. A request that arrives after the last step is refused, so its client always receives a last event.
"""

import threading
from collections.abc import Sequence
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
from quire.engine.port import CommandWatch, Listener, OnFailure
from quire.errors import EngineDeadError

STOPPED = "the engine has stopped; start it again"


class LoopHost(Protocol):
    """The source of a loop's commands, and the destination of its results."""

    def next_command(self, *, waits: bool) -> Command | None:
        """Return the next command, or None. If `waits`, the engine is idle and the call may block."""

    def note_requests(self, request_ids: list[str]) -> None:
        """Note the requests of the next command or step, in case it crashes."""

    def send(self, events: Sequence[RequestEvent]) -> None:
        """Send the events of commands or of a step, possibly none."""

    def show(self, snapshot: EngineSnapshot) -> None:
        """Send a snapshot to the watchers."""

    def reply(self, reply: CallReply) -> None:
        """Send the reply to a call."""


def run_loop(engine: Engine, host: LoopHost, clock: Clock = monotonic) -> None:
    """Execute commands and steps until `Close`."""
    is_open = True
    while is_open:
        events: list[RequestEvent] = []
        is_open = _execute_commands(engine, host, clock, events)
        if events:  # sent before the step, which may take long, and before the loop ends
            host.send(events)
        if is_open:
            host.send(engine.step(clock, host.note_requests))
        if engine.watch is not None and not engine.has_work:
            engine.watch.work(clock)


def _execute_commands(engine: Engine, host: LoopHost, clock: Clock, events: list[RequestEvent]) -> bool:
    """Execute all commands that have arrived, and add their events; return False after `Close`."""
    while (command := host.next_command(waits=not engine.has_work and not events)) is not None:
        match command:
            case Submit() | Restore():
                host.note_requests([command.request_id])
                events += engine.enter(command.to_request(clock()), is_restored=isinstance(command, Restore))
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


class EngineThread:
    """A port to an engine in this process, which a thread steps from `start` to `close`.

    The listener is called on this thread or on the caller's thread, and must return quickly.
    """

    def __init__(self, engine: Engine, listener: Listener, failed: OnFailure) -> None:
        self._engine = engine
        self._listener = listener
        self._failed = failed
        self.commands: SimpleQueue[Command] = SimpleQueue()
        self._lock = threading.Lock()
        self.watching = CommandWatch(self._try_put)
        self._calls = PendingCalls()
        self.admission_hints: Sequence[AdmissionHint] = ()
        self._is_over = False
        """Guarded by the lock. Once true, `_try_put` rejects commands."""
        self.thread = threading.Thread(target=self._run, name="quire-steps", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self.thread.start()

    def submit(self, request: Request) -> None:
        if not self._try_put(Submit.of(request, monotonic())):
            self._listener([Refused.of(request.request_id, EngineDeadError(STOPPED))])

    def call(self, op: CallOp, on_reply: OnReply) -> None:
        if not self._try_put(self._calls.open(op, on_reply)):
            self._calls.fail_all(EngineDeadError(STOPPED))

    def cancel(self, request_id: str, index: int | None = None) -> None:
        self.commands.put(Cancel(request_id, index))

    def clear_cache(self) -> None:
        self.commands.put(ClearCache())

    def close(self) -> None:
        """Stop after the step in flight, and wait for the thread."""
        self.commands.put(Close())
        self.thread.join()

    def _try_put(self, command: Command) -> bool:
        with self._lock:
            if not self._is_over:
                self.commands.put(command)
            return not self._is_over

    # -- on its own thread ---------------------------------------------------------------------------------------------

    def next_command(self, *, waits: bool) -> Command | None:
        watch = self._engine.watch
        try:
            return self.commands.get(waits, None if watch is None else watch.seconds_until_due(monotonic()))
        except Empty:
            return None

    def note_requests(self, request_ids: list[str]) -> None:
        """Do nothing: without a worker process, a crash ends all requests anyway."""

    def show(self, snapshot: EngineSnapshot) -> None:
        self.watching.show(snapshot)

    def reply(self, reply: CallReply) -> None:
        self._calls.resolve(reply)

    def send(self, events: Sequence[RequestEvent]) -> None:
        if events:
            shares = self._engine.scheduler.queue.shares
            self.admission_hints = shares.update_hints() if shares.refused else ()
            self._listener(events)

    def _run(self) -> None:
        try:
            run_loop(self._engine, self)
        except BaseException as error:
            self._failed(error)
        finally:
            self._refuse_remaining()
            self._engine.close()

    def _refuse_remaining(self) -> None:
        with self._lock:
            self._is_over = True
        error = EngineDeadError("the engine stopped before it received this request; send it again")
        while (command := self.next_command(waits=False)) is not None:
            if isinstance(command, Submit):
                self._listener([Refused.of(command.request_id, error)])
        self._calls.fail_all(error)
