"""A process of our own for work that a client's input could make last or grow. It reads frames on its stdin, is
bounded, and is killed when it does not answer in time. It ends with this process: its stdin closes.

    server    Helper ────────────────► request ───────────────► request …
    process   serve: bound memory ─► receive ─► bound time ─► send

The memory of such a process is bounded by the system, its time by the server, and by the system again if the server is
gone. Frames hold JSON; of which shape, `grammar_messages` and `template_messages` define.
"""

import os
import resource
import socket
import subprocess
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from time import clock_gettime, monotonic
from typing import TypeVar

import msgspec

MAX_FRAME_BYTES = 64 * 1024 * 1024
LENGTH_BYTES = 4
START_S = 60.0
"""A busy machine may take its time to start an interpreter."""
CPU_S = 4
"""Processor time for one frame. The server kills the process sooner, unless it has ended itself."""
ENVIRONMENT = ("PATH", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "LC_TIME", "SYSTEMROOT")
"""What of our environment the process receives; no tokens and no keys."""
NICENESS = 10
"""On a core that a worker uses too, about a tenth is left."""
SESSION = Path("/proc/self/autogroup")
BROKEN = (OSError, EOFError, msgspec.MsgspecError)
"""What a helper that does not answer as it should ends in."""
T = TypeVar("T")

encode_frame = msgspec.json.Encoder().encode
"""Raises TypeError, ValueError or RecursionError for what JSON cannot express."""


def processor_s(pid: int) -> float | None:
    """Processor time that a child has used so far; None where the system has no such clock."""
    try:
        return clock_gettime((~pid << 3) | 2)  # as clock_getcpuclockid(3) of Linux names it
    except OSError:
        return None


# -- frames ------------------------------------------------------------------------------------------------------------


def send(end: socket.socket, data: bytes, deadline_s: float | None = None) -> None:
    """One frame. Raises OSError, TimeoutError if it is not taken by the deadline (of the monotonic clock)."""
    _allow(end, deadline_s)
    end.sendall(len(data).to_bytes(LENGTH_BYTES, "little") + data)


def receive(end: socket.socket, deadline_s: float | None = None) -> bytes:
    """One frame. Raises EOFError if the other side has ended, OSError, TimeoutError."""
    size = int.from_bytes(_exactly(end, LENGTH_BYTES, deadline_s), "little")
    if size > MAX_FRAME_BYTES:
        raise EOFError(f"expected a frame of at most {MAX_FRAME_BYTES} bytes, got {size}")
    return bytes(_exactly(end, size, deadline_s))


def _exactly(end: socket.socket, size: int, deadline_s: float | None) -> bytearray:
    data = bytearray(size)
    view = memoryview(data)
    while view:
        _allow(end, deadline_s)
        count = end.recv_into(view)
        if not count:
            raise EOFError("the other process has ended")
        view = view[count:]
    return data


def _allow(end: socket.socket, deadline_s: float | None) -> None:
    if deadline_s is not None:
        # A timeout of zero would mean not to wait at all: what is there already is still taken.
        end.settimeout(max(0.001, deadline_s - monotonic()))


# -- in the process ----------------------------------------------------------------------------------------------------


def serve(answer: Callable[[bytes], bytes], memory_bytes: int) -> None:
    """Answer frames, one after the other, until the server has ended; within so much address space."""
    _bound_memory(memory_bytes)
    end = socket.socket(fileno=0)
    send(end, b"")  # it has started
    while True:
        try:
            frame = receive(end)
        except EOFError:
            return
        _bound_time()
        send(end, answer(frame))


def lower_priority() -> None:
    """Yield the cores to the worker's threads: a step is as long as its slowest one. Where the system gives each
    session its share whatever the priorities, this session's is lowered too."""
    with suppress(OSError):
        os.nice(NICENESS)
        SESSION.write_text(str(NICENESS))


def _bound_memory(num_bytes: int) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    most = num_bytes if hard == resource.RLIM_INFINITY else min(num_bytes, hard)
    resource.setrlimit(resource.RLIMIT_AS, (most, hard))


def _bound_time() -> None:
    """The system ends a process that uses more processor time than this from now on, whatever else is alive."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (int(used.ru_utime + used.ru_stime) + CPU_S, hard))


# -- in the server -----------------------------------------------------------------------------------------------------


class StoppedError(Exception):
    """A helper was killed, or ended by itself, before it answered."""

    def __init__(self, message: str, *, is_starved: bool = False) -> None:
        super().__init__(message)
        self.is_starved = is_starved
        """It hardly ran at all: it was held up, and what it had to do is not to blame."""


class Helper:
    """One process. For one thread at a time; `stop` may come from any."""

    def __init__(self, command: Sequence[str]) -> None:
        """Start it, and wait for its first frame. Raises OSError."""
        self._end, theirs = socket.socketpair()
        try:
            with theirs:
                self._process = subprocess.Popen(  # noqa: S603 - our own modules
                    command,
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    env={name: os.environ[name] for name in ENVIRONMENT if name in os.environ},
                    start_new_session=True,  # a Ctrl-C is for the server
                )
        except OSError:
            self._end.close()
            raise
        try:
            receive(self._end, monotonic() + START_S)
        except BROKEN as error:
            raise OSError(f"it {self._stopped(error)}") from None

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """It has not ended by itself."""
        return self._process.poll() is None

    def request(self, frame: bytes, decode: Callable[[bytes], T], time_s: float) -> T:
        """Its answer within this time, or it is killed and StoppedError has the reason."""
        begun_s, deadline_s = processor_s(self.pid), monotonic() + time_s
        try:
            send(self._end, frame, deadline_s)
            return decode(receive(self._end, deadline_s))
        except BROKEN as error:
            ended_s = processor_s(self.pid)
            is_starved = begun_s is not None and ended_s is not None and ended_s - begun_s < time_s / 10
            raise self._stopped(error, is_starved=is_starved) from None

    def stop(self) -> None:
        """End the process, whatever it does; a caller that waits for its answer gets StoppedError."""
        self._process.kill()

    def kill(self) -> None:
        """End it, and leave nothing behind."""
        self.stop()
        self._process.wait()
        self._end.close()

    def _stopped(self, error: Exception, *, is_starved: bool = False) -> StoppedError:
        self.kill()
        if isinstance(error, TimeoutError):
            return StoppedError("took longer and was stopped", is_starved=is_starved)
        return StoppedError("ended unexpectedly")
