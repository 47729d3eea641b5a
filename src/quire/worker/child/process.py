"""The worker process, which owns a model: an inbox, the engine's loop, an outbox. Token ids in, events out.

    parent ─► inbox ─► [ heartbeat · execute commands · record ids · step · send ] ─► outbox ─► parent

It records a step's request ids before running the step, and counts its loop's iterations (heartbeats), both in the
shared status. Any unhandled error ends it, and its parent replaces it. It never outlives its parent.

    python -m quire.worker.child.process SOCKET_PATH STATUS_FD LIVENESS_FD PARENT_PID
"""

import ctypes
import os
import signal
import socket
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import partial
from math import inf
from pathlib import Path
from shutil import rmtree
from time import monotonic, time
from typing import TypeVar

import zmq

from quire.backends.protocol import CountsLayers
from quire.checkpoints import Progress, resolve
from quire.core.events import KVEvent, RequestEvent, Token
from quire.core.inspect.snapshots import EngineSnapshot
from quire.core.work_budget import WorkSpent
from quire.engine.calls import CallReply
from quire.engine.commands import Command
from quire.engine.engine import Engine
from quire.engine.grammar_thread import NICENESS, lower_thread_priority
from quire.engine.loading import open_engine
from quire.engine.loop import run_loop
from quire.errors import InvariantError, QuireError
from quire.lasting_objects import freeze_startup_objects
from quire.worker import messages
from quire.worker.child.faults import faults_from, inject_faults
from quire.worker.child.kv_events import KVEventPublisher
from quire.worker.child.shared_status import SharedStatus
from quire.worker.messages import Open, Ready, SnapshotMade, Stepped, ToParent, ToWorker, WorkerLoad

LOAD_S = 0.1
"""Interval between two load reports while only tokens are sent."""
MAX_TENANTS_REPORTED = 64
"""Number of tenants whose grammar work is reported to the parent."""
IDLE_S = 0.25
"""Longest sleep of an idle worker between two heartbeats."""
MAX_BACKLOG_BYTES = 64 << 20
"""If more bytes are unread, the parent has stopped reading, and the worker exits."""
LINGER_MS = 1000
PR_SET_PDEATHSIG = 1
AUTOGROUP_FILE = Path("/proc/self/autogroup")
FAILED = 70
"""Exit code of a worker that sent a Failed message."""

T = TypeVar("T")
Emit = Callable[[KVEvent], None]
Opener = Callable[[Open, Progress, Emit | None], Engine]


class Channel:
    """The worker's end of the socket. Sending never blocks: unread messages are kept in a bounded backlog."""

    def __init__(self, socket: "zmq.Socket[bytes]") -> None:
        self._socket = socket
        self._backlog: deque[bytes] = deque()
        self._num_backlog_bytes = 0

    def send(self, message: ToParent) -> None:
        """Send a message, or queue it until the parent reads. Raises InvariantError if the backlog is too large."""
        data = messages.encode_message(message)
        self._backlog.append(data)
        self._num_backlog_bytes += len(data)
        self.flush()
        if self._num_backlog_bytes > MAX_BACKLOG_BYTES:
            raise InvariantError(
                f"expected at most {MAX_BACKLOG_BYTES} bytes unread by the parent, got {self._num_backlog_bytes}"
            )

    @property
    def is_behind(self) -> bool:
        """Whether the parent has unread messages in the backlog."""
        return bool(self._backlog)

    def flush(self) -> None:
        """Send as much of the backlog as the socket accepts."""
        while self._backlog:
            try:
                self._socket.send(self._backlog[0], zmq.DONTWAIT)
            except zmq.Again:
                return
            self._num_backlog_bytes -= len(self._backlog.popleft())

    def receive(self, timeout_s: float) -> ToWorker | None:
        """Return the next message, or None on timeout."""
        if timeout_s and not self._socket.poll(int(timeout_s * 1000)):
            return None
        try:
            return messages.decode_to_worker(self._socket.recv(zmq.DONTWAIT))
        except zmq.Again:
            return None


class Worker:
    """The host of the engine's loop: passes it commands from the channel and sends its events there."""

    def __init__(
        self, engine: Engine, channel: Channel, status: SharedStatus, publisher: KVEventPublisher | None
    ) -> None:
        self._engine = engine
        self._channel = channel
        self._status = status
        self._publisher = publisher
        self._step_tokens: list[int] = []
        """Token counts of steps that are not reported yet."""
        self._num_steps = self._num_computed = 0
        self._load_sent_s = -inf

    def record_suspects(self) -> None:
        """After an error, record all live requests as in flight, unless a step had recorded its own."""
        if not self._status.read().request_ids:
            self._status.record_request_ids([*self._engine.scheduler.live])

    # -- the loop's host -----------------------------------------------------------------------------------------------

    def next_command(self, *, waits: bool) -> Command | None:
        """Return the next command or None, after a wait if `waits`. Records a heartbeat, and that no step runs."""
        self._status.clear_in_flight()
        self._status.record_heartbeat()
        self._channel.flush()
        publisher_has_work = self._publisher is not None and self._publisher.has_work
        command = self._channel.receive(self._max_wait_s() if waits and not publisher_has_work else 0.0)
        if isinstance(command, Open):
            raise InvariantError("expected one Open message, got a second one")
        return command

    def note_requests(self, request_ids: list[str]) -> None:
        """Record the ids of a step's requests: they are the suspects if this process dies now."""
        self._status.record_request_ids(request_ids)
        plan = self._engine.scheduler.in_flight
        if plan is not None:
            self._status.begin_step(sum(len(item.token_ids) for item in plan.items))
            if (load := self._load_when_due(has_news=False)) is not None:  # the step may take long
                self._channel.send(Stepped((), load))

    def send(self, events: Sequence[RequestEvent]) -> None:
        """Send events to the parent and publish cache events, after a step or commands. A step that only prefills has
        no events, but is reported in the load."""
        self._status.clear_in_flight()
        self._count_step()
        has_news = any(type(event) is not Token for event in events)
        load = self._load_when_due(has_news=has_news) if events or self._step_tokens else None
        if events or load is not None:
            self._channel.send(Stepped(tuple(events), load))
        if self._publisher is not None:
            self._publisher.publish(time())

    def show(self, snapshot: EngineSnapshot) -> None:
        """Send a snapshot, unless the parent is behind: the next snapshot replaces a skipped one."""
        if not self._channel.is_behind:
            self._channel.send(SnapshotMade(snapshot))

    def reply(self, reply: CallReply) -> None:
        """Send the reply to the parent."""
        self._channel.send(reply)

    def _max_wait_s(self) -> float:
        watch = self._engine.watch
        return IDLE_S if watch is None else min(IDLE_S, watch.seconds_until_due(monotonic()))

    def _count_step(self) -> None:
        totals = self._engine.scheduler.stats
        if totals.num_steps > self._num_steps:
            self._step_tokens.append(totals.num_computed_tokens - self._num_computed)
            self._num_steps, self._num_computed = totals.num_steps, totals.num_computed_tokens

    def _load_when_due(self, *, has_news: bool) -> WorkerLoad | None:
        """Return the load if there are events other than tokens (`has_news`), and otherwise at most every LOAD_S."""
        now_s = monotonic()
        if not has_news and now_s - self._load_sent_s < LOAD_S:
            return None
        self._load_sent_s = now_s
        return self._load()

    def _load(self) -> WorkerLoad:
        scheduler, memory = self._engine.scheduler, self._engine.memory
        totals, shares = scheduler.stats, scheduler.queue.shares
        step_tokens, self._step_tokens = tuple(self._step_tokens), []
        guides = self._engine.guides
        return WorkerLoad(
            num_running=len(scheduler.running),
            num_waiting=scheduler.queue.num_waiting,
            num_used_blocks=memory.config.num_blocks - memory.pool.num_free,
            num_steps=totals.num_steps,
            num_computed_tokens=totals.num_computed_tokens,
            num_preemptions=totals.num_preemptions,
            step_tokens=step_tokens,
            admission_hints=shares.update_hints() if shares.refused else (),
            num_draft_tokens=totals.num_draft_tokens,
            num_accepted_tokens=totals.num_accepted_tokens,
            num_forced_tokens=totals.num_forced_tokens,
            grammar_compile_s=0.0 if guides is None else guides.compile_s,
            grammar_mask_s=0.0 if guides is None else guides.mask_s,
            num_snapshots=self._engine.num_snapshots,
            work=WorkSpent() if guides is None else guides.budget.spent(MAX_TENANTS_REPORTED),
            num_pins_yielded=memory.pins.num_yielded,
        )


def run_at_low_priority(work: Callable[[], T]) -> T:
    """Return the result of the work, which must not slow down other models on this machine.

    The work runs in its own thread, because an unprivileged thread cannot raise its priority again; threads that it
    starts inherit the low priority. Where the kernel divides time between sessions first (autogroups), the session's
    priority is lowered as well until the work ends.
    """
    _set_session_niceness(NICENESS)
    try:
        with ThreadPoolExecutor(1, "quire-load", lower_thread_priority) as thread:
            return thread.submit(work).result()
    finally:
        _set_session_niceness(0)


def _set_session_niceness(niceness: int) -> None:
    with suppress(OSError):
        AUTOGROUP_FILE.write_text(str(niceness))


def open_checkpoint(message: Open, progress: Progress, emit: Emit | None) -> Engine:
    """Load the model from the local directory or file to which the parent resolved its name."""
    return open_engine(resolve(message.model), message.settings, message.queue, message.key, progress, emit)


def run_worker(arguments: list[str], opener: Opener = open_checkpoint) -> int:
    """Run a worker until it is closed; return its exit code."""
    socket_path, status_fd, liveness_fd, parent_pid = arguments
    for descriptor in (int(status_fd), int(liveness_fd)):
        os.set_inheritable(descriptor, False)  # processes started by the worker must not keep them open after its end
    for signal_number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signal_number, signal.SIG_IGN)  # only the parent ends a worker
    with zmq.Context() as context, context.socket(zmq.PAIR) as socket_to_parent:
        socket_to_parent.setsockopt(zmq.LINGER, LINGER_MS)
        socket_to_parent.connect(f"ipc://{socket_path}")
        channel = Channel(socket_to_parent)
        open_message = _receive_open_message(channel, Path(socket_path).parent, int(parent_pid))
        if open_message is None:
            return 0
        _exit_with_parent(int(parent_pid), socket.socket(fileno=int(liveness_fd)))
        return _serve(open_message, opener, channel, SharedStatus(int(status_fd)))


def _receive_open_message(channel: Channel, folder: Path, parent_pid: int) -> Open | None:
    """Wait for the Open message; None if the parent has died. Removes the socket's folder in either case."""
    try:
        while os.getppid() == parent_pid:
            message = channel.receive(IDLE_S)
            if isinstance(message, Open):
                return message
        return None
    finally:
        rmtree(folder, ignore_errors=True)


def _exit_with_parent(parent_pid: int, liveness_socket: socket.socket) -> None:
    """Exit with the parent: on Linux the kernel kills this process; elsewhere a thread waits for its closing."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(0)

    def watch() -> None:
        while liveness_socket.recv(1):
            pass
        os._exit(0)

    threading.Thread(target=watch, name="quire-leash", daemon=True).start()


def _serve(open_message: Open, opener: Opener, channel: Channel, status: SharedStatus) -> int:
    worker: Worker | None = None

    def progress(label: str, done_bytes: int, total_bytes: int) -> None:
        channel.send(messages.LoadProgress(label, done_bytes, total_bytes))

    with ExitStack() as resources:
        try:
            publisher = None if open_message.kv_events is None else KVEventPublisher(open_message.kv_events)
            if publisher is not None:
                resources.callback(publisher.close)
            load = partial(opener, open_message, progress, None if publisher is None else publisher.emit)
            loaded_engine = run_at_low_priority(load) if open_message.runs_at_low_priority else load()
            if isinstance(loaded_engine.runner, CountsLayers):
                status.step_layers = loaded_engine.runner.count_layers(status.layers)
            engine = inject_faults(loaded_engine, faults_from(os.environ))
            if open_message.trace is not None:
                engine.record(open_message.trace, time())
            if publisher is not None:
                publisher.enable_snapshots(engine.memory.stored_events)
            worker = Worker(engine, channel, status, publisher)
            resources.callback(engine.recorder.close)
            freeze_startup_objects()
            status.record_heartbeat()
            channel.send(Ready(engine.info))
            run_loop(engine, worker)
        except Exception as error:
            # A bug, a lost device or no memory: the parent starts a new worker and resubmits the requests.
            if worker is not None:
                worker.record_suspects()
            code = error.code if isinstance(error, QuireError) else None
            channel.send(messages.Failed(type(error).__name__, str(error), code))
            return FAILED
    return 0


if __name__ == "__main__":
    sys.exit(run_worker(sys.argv[1:]))
