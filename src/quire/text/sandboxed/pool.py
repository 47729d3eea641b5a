"""The server's side of helper processes: started on demand, loaded once, killed if a request takes too long.

    reserve ─► request: a free helper, or a new one that is loaded first ─► free again, or killed

A helper works for one thread at a time. If a request exceeds its time limit, the helper is killed, and the next request
starts a new one. Threads are served in order of arrival.
"""

import atexit
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import clock_gettime, monotonic
from typing import Generic, TypeVar

import msgspec

from quire.errors import CapacityError, EngineDeadError
from quire.text.sandboxed.helper import receive, send

T = TypeVar("T")


START_S = 60.0
"""Time limit for starting a helper; long, because an interpreter may start slowly on a busy machine."""
ENVIRONMENT = ("PATH", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "LC_TIME", "SYSTEMROOT")
"""Environment variables that a helper inherits; no tokens or keys."""
FAILURES = (OSError, EOFError, msgspec.MsgspecError)
"""Exceptions after which a helper is killed: no response in time, no process, or an invalid response."""


class StoppedError(Exception):
    """A helper was killed, or ended by itself, before it responded."""

    def __init__(self, message: str, *, is_starved: bool = False) -> None:
        super().__init__(message)
        self.is_starved = is_starved
        """The helper got almost no CPU time, so the timeout is not due to its work."""


class Helper:
    """One helper process. For one thread at a time, except `stop`, which any thread may call."""

    def __init__(self, command: Sequence[str]) -> None:
        """Start the process and wait for its first frame. Raises OSError."""
        self._end, theirs = socket.socketpair()
        try:
            with theirs:
                self._process = subprocess.Popen(  # noqa: S603 - our own modules
                    command,
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    env={name: os.environ[name] for name in ENVIRONMENT if name in os.environ},
                    start_new_session=True,  # Ctrl-C must reach only the server
                )
        except OSError:
            self._end.close()
            raise
        try:
            receive(self._end, monotonic() + START_S)
        except FAILURES as error:
            raise OSError(f"it {self._stopped(error)}") from None

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def request(self, frame: bytes, decode: Callable[[bytes], T], time_s: float) -> T:
        """Return the response to a frame. After `time_s` or on failure, kill the process and raise StoppedError."""
        start_cpu_s, deadline_s = processor_s(self.pid), monotonic() + time_s
        try:
            send(self._end, frame, deadline_s)
            return decode(receive(self._end, deadline_s))
        except FAILURES as error:
            end_cpu_s = processor_s(self.pid)
            is_starved = start_cpu_s is not None and end_cpu_s is not None and end_cpu_s - start_cpu_s < time_s / 10
            raise self._stopped(error, is_starved=is_starved) from None

    def stop(self) -> None:
        """Kill the process; a thread that waits for its response gets StoppedError."""
        self._process.kill()

    def kill(self) -> None:
        """Kill the process, reap it and close the socket."""
        self.stop()
        self._process.wait()
        self._end.close()

    def _stopped(self, error: Exception, *, is_starved: bool = False) -> StoppedError:
        self.kill()
        if isinstance(error, TimeoutError):
            return StoppedError("took longer and was stopped", is_starved=is_starved)
        return StoppedError("ended unexpectedly")


def processor_s(pid: int) -> float | None:
    """Return the CPU time that a child process has used so far; None if the system has no such clock."""
    try:
        return clock_gettime((~pid << 3) | 2)  # the id that clock_getcpuclockid(3) returns on Linux
    except OSError:
        return None


class NotLoadedError(StoppedError):
    """A helper took too long, or ended, while it processed its load frame."""


class IdleHelpers:
    """Idle helpers for reuse by other models, because starting one costs more than a hundred renderings."""

    def __init__(self, module: str, purpose: str, max_idle: int = 0) -> None:
        self.command: tuple[str, ...] = (sys.executable, "-m", module)
        self._purpose = purpose
        self._max_idle = max_idle
        self._idle: list[Helper] = []
        # Reentrant, because garbage collection of an owner returns its helpers at any point of a thread's code.
        self._lock = threading.RLock()
        atexit.register(self.kill_all)

    def take(self) -> Helper:
        """Return an idle helper or start a new one. Raises CapacityError if none can be started."""
        with self._lock:
            helper = _pop_alive(self._idle)
        try:
            return helper or Helper(self.command)
        except OSError as error:
            message = f"cannot start a process {self._purpose}: {error.strerror or error}; try again"
            raise CapacityError(message, code="process_not_started") from None

    def give_back(self, helper: Helper) -> None:
        """Keep a helper that its model no longer needs, or kill it if `max_idle` are idle already."""
        with self._lock:
            if len(self._idle) < self._max_idle:
                self._idle.append(helper)
                return
        helper.kill()

    def kill_all(self) -> None:
        """Kill all idle helpers; runs when this process exits."""
        with self._lock:
            idle, self._idle = self._idle, []
        for helper in idle:
            helper.kill()


class HelperPool(Generic[T]):
    """The helpers of one model, at most `size`, loaded with the same frame. Thread-safe. The owner calls `close`."""

    def __init__(
        self, idle: IdleHelpers, load: Callable[[], bytes], decode: Callable[[bytes], T], load_s: float, size: int = 1
    ) -> None:
        self._idle = idle
        self._load = load
        self._decode = decode
        self._load_s = load_s
        self._size = size
        self._condition = threading.Condition()
        self._tickets: list[object] = []
        """Tickets in order of arrival: the first `size` may use a helper, the others wait."""
        self._free: list[Helper] = []
        self._busy: set[Helper] = set()
        self._is_closed = False

    @contextmanager
    def reserve(self) -> Iterator[None]:
        """Wait until this thread may use a helper. Raises EngineDeadError if the pool is closed."""
        ticket = object()
        with self._condition:
            self._tickets.append(ticket)
        try:
            with self._condition:
                self._condition.wait_for(lambda: self._is_closed or ticket in self._tickets[: self._size])
                self._check_open()
            yield
        finally:
            with self._condition:
                self._tickets.remove(ticket)
                self._condition.notify_all()

    def request(self, frame: bytes, time_s: float) -> T:
        """Return a helper's response; only inside `reserve`. Raises StoppedError, and like `load` and `reserve`."""
        with self._condition:
            helper = _pop_alive(self._free)
        load = self._load() if helper is None else None
        return self._exchange(helper or self._idle.take(), load, frame, time_s)

    def load(self) -> T:
        """Start a helper and return its response to the load frame. Raises NotLoadedError, CapacityError."""
        load = self._load()
        return self._exchange(self._idle.take(), load)

    def close(self) -> None:
        """Close the pool with its model: stop busy helpers at once, return free ones to the idle helpers."""
        with self._condition:
            self._is_closed = True
            free, self._free = self._free, []
            for helper in self._busy:
                helper.stop()
            self._condition.notify_all()
        for helper in free:
            self._idle.give_back(helper)

    def _exchange(self, helper: Helper, load: bytes | None, frame: bytes | None = None, time_s: float = 0.0) -> T:
        """Send these frames and return the response to the last. Frees the helper afterwards, or kills it on errors."""
        try:
            with self._condition:
                self._check_open()
                self._busy.add(helper)
            if load is not None:
                answer = self._load_helper(helper, load)
            if frame is not None:
                answer = helper.request(frame, self._decode, time_s)
        except BaseException as error:
            helper.kill()
            with self._condition:
                self._busy.discard(helper)
            if isinstance(error, StoppedError):
                self._check_open()
            raise
        with self._condition:
            self._busy.discard(helper)
            if not self._is_closed:
                self._free.append(helper)
                return answer
        helper.kill()
        return answer

    def _load_helper(self, helper: Helper, load: bytes) -> T:
        try:
            return helper.request(load, self._decode, self._load_s)
        except StoppedError as error:
            raise NotLoadedError(str(error)) from None

    def _check_open(self) -> None:
        if self._is_closed:
            raise EngineDeadError("the model is closed; open it again")


def _pop_alive(helpers: list[Helper]) -> Helper | None:
    """Return a running helper and discard those that have ended, for example killed by the system."""
    while helpers:
        helper = helpers.pop()
        if helper.is_alive:
            return helper
        helper.kill()
    return None
