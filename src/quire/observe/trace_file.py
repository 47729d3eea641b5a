"""Writes a trace file. A separate thread writes the queued lines, so that the caller never blocks and never fails.

The file is private to its owner (0600), newly created and append-only; a restarted worker appends to the same file. At
the maximum size, or if the disk is full or too slow, the trace ends with a warning and, if there is space, a line with
the reason. The server continues.
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
"""Seconds for which lines are collected before a write; a killed worker loses at most the lines of this time."""
MAX_PENDING_BYTES = 32 << 20
"""Limit on unwritten bytes; beyond it, the disk is too slow and the trace ends."""
LAST_LINE_BYTES = 256
"""Bytes reserved for the last line, with the reason why the trace ended."""
CLOSE_TIMEOUT_S = 5.0
Write = Callable[[int, bytes], int]


def make_trace_file(path: Path) -> None:
    """Create an empty file, private to its owner. Raises ConfigError on failure, and if the path exists already."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        message = f"expected a new file for the trace, got {path}, which exists; name another file, or remove this one"
        raise ConfigError(message, ("trace",), code="trace_exists") from None
    except OSError as error:
        message = f"cannot create the trace {path}: {error.strerror}; name a file in an existing folder that you own"
        raise ConfigError(message, ("trace",), code="cannot_create_trace") from error
    os.close(descriptor)


class TraceFile:
    """Appends lines to a file that `make_trace_file` has created."""

    def __init__(self, path: Path, max_bytes: int, write: Write = os.write) -> None:
        """Open the file. Raises ConfigError if it is missing, or not private to this user."""
        self.end_reason: str | None = None
        """The reason why the trace ended; None while it continues."""
        self._descriptor = _open_for_append(path)
        self._path = path
        self._max_bytes = max_bytes
        self._write = write
        self._lines: deque[bytes] = deque()
        self._num_bytes = os.fstat(self._descriptor).st_size
        """Size of the file including queued lines; only the caller's thread updates it."""
        self._num_queued = self._num_written = 0
        self._has_lines = threading.Event()
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="quire-trace", daemon=True)
        self._thread.start()
        if self._num_bytes:  # an earlier worker may have been killed while it wrote a line
            self.put(b"\n")

    def put(self, line: bytes) -> None:
        """Queue a line, which must end in a newline. Does nothing after the trace has ended."""
        if self.end_reason is not None:
            return
        if self._num_bytes + len(line) > self._max_bytes - LAST_LINE_BYTES:
            self.end(f"the file has reached its limit of {self._max_bytes:,} bytes; raise trace_max_bytes")
        elif self._num_queued + len(line) - self._num_written > MAX_PENDING_BYTES:
            self.end("the disk is too slow")
        else:
            self._append(line)

    def end(self, why: str) -> None:
        """End the trace; write the reason to the file and to the log."""
        if self.end_reason is None:
            line = dumps({"is": "ended", "why": why[: LAST_LINE_BYTES - 32]}).encode() + b"\n"
            if self._num_bytes + len(line) <= self._max_bytes:
                self._append(line)
            self._stop(why)

    def close(self) -> None:
        """Write the remaining lines and close the file."""
        if not self._is_closing:
            self._is_closing = True
            self._has_lines.set()
            self._thread.join(CLOSE_TIMEOUT_S)

    def _append(self, line: bytes) -> None:
        self._num_bytes += len(line)
        self._num_queued += len(line)
        self._lines.append(line)
        if not self._has_lines.is_set():
            self._has_lines.set()

    def _stop(self, why: str) -> None:
        self.end_reason = why
        log.warning("stopping the trace %s: %s", self._path, why)

    # -- on the writer thread ------------------------------------------------------------------------------------------

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
            self._stop(f"cannot write to it: {error.strerror}")
        finally:
            os.close(self._descriptor)

    def _write_all(self) -> None:
        data = b"".join(self._lines.popleft() for _ in range(len(self._lines)))
        while data:
            num_bytes = self._write(self._descriptor, data)
            self._num_written += num_bytes
            data = data[num_bytes:]


def _open_for_append(path: Path) -> int:
    """Open for appending. Raises ConfigError unless it is a regular file, private to this user and not a symlink."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        message = f"cannot open the trace {path}: {error.strerror}; restart the server"
        raise ConfigError(message, code="cannot_open_trace") from error
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
        os.close(descriptor)
        raise ConfigError(f"expected the trace {path} to be a regular file of this user with mode 0600; name another")
    return descriptor
