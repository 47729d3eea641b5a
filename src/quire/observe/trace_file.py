"""A trace's file: lines handed in, written by a thread of its own. Whoever hands them in never waits, and never fails.

A file is its owner's alone (0600), is made anew and only grows; several lives of a worker write into it one after the
other. When it is as large as it may be, when the disk is full or too slow, the trace ends with a line that says so,
where there is room for one, and a warning; the server goes on.
"""

import logging
import os
import stat
import threading
import time
from collections import deque
from collections.abc import Callable
from json import dumps
from pathlib import Path

from quire.errors import ConfigError

log = logging.getLogger("quire.trace")

LINGER_S = 0.02
"""How long a line may wait for others to be written with it: what a worker that is killed loses of its trace."""
MAX_PENDING_BYTES = 32 << 20
"""A disk that is so far behind is too slow for this trace."""
LAST_LINE_BYTES = 256
"""Kept free for the line that says why a trace ends."""
CLOSE_S = 5.0
Write = Callable[[int, bytes], int]


def make_trace_file(path: Path) -> None:
    """Make it, empty, for its owner alone. Raises ConfigError, also where there is one: no trace is written over."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        raise ConfigError(
            f"a trace must be a new file, {path} is there; name another, or remove it", ("trace",)
        ) from None
    except OSError as error:
        raise ConfigError(
            f"the trace {path} cannot be made: {error.strerror}; name a file in a folder that is there and yours",
            ("trace",),
        ) from error
    os.close(descriptor)


class TraceFile:
    """Appends lines to a file that `make_trace_file` has made."""

    def __init__(self, path: Path, max_bytes: int, write: Write = os.write) -> None:
        """Raises ConfigError if it is not there, or not ours alone."""
        self.why_ended: str | None = None
        """Why nothing is written any more; None while the trace goes on."""
        self._descriptor = _opened(path)
        self._path = path
        self._max_bytes = max_bytes
        self._write = write
        self._lines: deque[bytes] = deque()
        self._num_bytes = os.fstat(self._descriptor).st_size
        """Of the file, with what is on its way into it; counted by who hands lines in."""
        self._num_put = self._num_written = 0
        self._has_lines = threading.Event()
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="quire-trace", daemon=True)
        self._thread.start()
        if self._num_bytes:  # a life before this one may have been ended within a line
            self.put(b"\n")

    def put(self, line: bytes) -> None:
        """Write this line, with its newline, soon. Nothing is done once the trace has ended."""
        if self.why_ended is not None:
            return
        if self._num_bytes + len(line) > self._max_bytes - LAST_LINE_BYTES:
            self.end(f"the file may have {self._max_bytes:,} bytes; raise trace_max_bytes")
        elif self._num_put + len(line) - self._num_written > MAX_PENDING_BYTES:
            self.end("the disk is too slow")
        else:
            self._put(line)

    def end(self, why: str) -> None:
        """Say in the file and in the log that the trace ends here."""
        if self.why_ended is None:
            line = dumps({"is": "ended", "why": why[: LAST_LINE_BYTES - 32]}).encode() + b"\n"
            if self._num_bytes + len(line) <= self._max_bytes:
                self._put(line)
            self._give_up(why)

    def close(self) -> None:
        """Write what is left, and let go of the file."""
        if not self._is_closing:
            self._is_closing = True
            self._has_lines.set()
            self._thread.join(CLOSE_S)

    def _put(self, line: bytes) -> None:
        self._num_bytes += len(line)
        self._num_put += len(line)
        self._lines.append(line)
        if not self._has_lines.is_set():
            self._has_lines.set()

    def _give_up(self, why: str) -> None:
        self.why_ended = why
        log.warning("the trace %s ends: %s", self._path, why)

    # -- on its own thread ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._is_closing:
                self._has_lines.wait()
                if not self._is_closing:
                    time.sleep(LINGER_S)
                self._has_lines.clear()
                self._write_all()
            self._write_all()
        except OSError as error:
            self._lines.clear()
            self._give_up(f"it cannot be written: {error.strerror}")
        finally:
            os.close(self._descriptor)

    def _write_all(self) -> None:
        data = b"".join(self._lines.popleft() for _ in range(len(self._lines)))
        while data:
            num_bytes = self._write(self._descriptor, data)
            self._num_written += num_bytes
            data = data[num_bytes:]


def _opened(path: Path) -> int:
    """A descriptor to append to a plain file that is ours alone, and not a link to one."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise ConfigError(f"the trace {path} cannot be opened: {error.strerror}; start the server anew") from error
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
        os.close(descriptor)
        raise ConfigError(f"the trace {path} must be a plain file of ours with mode 0600, it is not; name another")
    return descriptor
