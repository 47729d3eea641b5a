"""A helper process for work whose cost depends on a client's input. It reads frames from stdin, which is a socket, has
limits on memory and time, and exits when the server ends and so closes the socket.

    server    Helper ────────────────► request ───────────────► request …
    process   serve: limit memory ─► receive ─► limit time ─► send

The system limits the memory of a helper. The server limits its time, and the system does so if the server is gone.
Frames are JSON, as defined in `messages`.
"""

import os
import resource
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from time import monotonic

import msgspec

MAX_FRAME_BYTES = 64 * 1024 * 1024
LENGTH_BYTES = 4
CPU_S = 4
"""CPU time limit for one frame, in case the server has ended; a running server kills the process earlier."""
NICENESS = 10
"""On a core shared with a worker thread, a process of this niceness gets about a tenth of the time."""
SESSION = Path("/proc/self/autogroup")

encode_frame = msgspec.json.Encoder().encode
"""Raises TypeError, ValueError or RecursionError for values that JSON cannot represent."""


# -- frames ------------------------------------------------------------------------------------------------------------


def send(end: socket.socket, data: bytes, deadline_s: float | None = None) -> None:
    """Send one frame. Raises OSError, or TimeoutError after the deadline (of the monotonic clock)."""
    _set_timeout(end, deadline_s)
    end.sendall(len(data).to_bytes(LENGTH_BYTES, "little") + data)


def receive(end: socket.socket, deadline_s: float | None = None) -> bytes:
    """Receive one frame. Raises EOFError if the peer has ended or the frame is too large, OSError, TimeoutError."""
    size = int.from_bytes(_receive_exactly(end, LENGTH_BYTES, deadline_s), "little")
    if size > MAX_FRAME_BYTES:
        raise EOFError(f"expected a frame of at most {MAX_FRAME_BYTES} bytes, got {size}")
    return bytes(_receive_exactly(end, size, deadline_s))


def _receive_exactly(end: socket.socket, size: int, deadline_s: float | None) -> bytearray:
    data = bytearray(size)
    view = memoryview(data)
    while view:
        _set_timeout(end, deadline_s)
        count = end.recv_into(view)
        if not count:
            raise EOFError("the other process has ended")
        view = view[count:]
    return data


def _set_timeout(end: socket.socket, deadline_s: float | None) -> None:
    if deadline_s is not None:
        # Not zero, which means non-blocking: data that has already arrived is still read after the deadline.
        end.settimeout(max(0.001, deadline_s - monotonic()))


# -- in the helper process ---------------------------------------------------------------------------------------------


def serve(answer: Callable[[bytes], bytes], memory_bytes: int) -> None:
    """Respond to frames, one at a time, until the server ends, with the address space limited to `memory_bytes`."""
    _limit_memory(memory_bytes)
    end = socket.socket(fileno=0)
    send(end, b"")  # the server waits for this frame as a sign of the start
    while True:
        try:
            frame = receive(end)
        except EOFError:
            return
        _limit_time()
        send(end, answer(frame))


def lower_priority() -> None:
    """Lower the priority below the worker's threads, because a step takes as long as its slowest thread. If Linux
    schedules by session (autogroup), the session's priority is lowered too."""
    with suppress(OSError):
        os.nice(NICENESS)
        SESSION.write_text(str(NICENESS))


def _limit_memory(num_bytes: int) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = num_bytes if hard == resource.RLIM_INFINITY else min(num_bytes, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))


def _limit_time() -> None:
    """Let the system kill this process if it uses more than `CPU_S` from now on, even if the server has ended."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (int(used.ru_utime + used.ru_stime) + CPU_S, hard))
