"""Runs a member as a child process: start it, check its health, stop it.

    this process ── model to load ──────► stdin ─ member ─ worker
                 ◄── status each second ─ stdout ─┘

Needs no event loop: a thread reads the status lines. When this process exits, the member's standard input closes, and
the member drains and exits.
"""

import contextlib
import logging
import os
import subprocess
import threading
from collections.abc import Sequence
from time import monotonic

import msgspec

from quire.errors import EngineDeadError, MessageError
from quire.fleet.member.replicas import COMMAND, END_S, ReplicaSpec, encode_spec
from quire.fleet.member.status import MemberStatus, decode_status

log = logging.getLogger("quire.fleet")

MAX_SILENT_S = 10.0
"""A member is unhealthy if it sends no status line for this long; healthy members send one each second."""
EXCLUDED_VARIABLES = ("OMP_NUM_THREADS",)
"""Environment variables that a member must not inherit from its control plane: quire has its own thread setting."""


class WatchedMember:
    """A member's process, watched by its parent."""

    def __init__(self, spec: ReplicaSpec, command: Sequence[str] = COMMAND) -> None:
        self._spec = msgspec.structs.replace(spec, reports_status=True)
        self._command = command
        self._process: subprocess.Popen[bytes] | None = None
        self._reader: threading.Thread | None = None
        self._first_status = threading.Event()
        """Set when the first status line arrives, or the output ends."""
        self._last_status_s = monotonic()
        self.status: MemberStatus | None = None
        """The latest status; None before the first."""

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def start(self) -> MemberStatus:
        """Start the process and wait until it is ready, which may take minutes. Raises EngineDeadError if it exits."""
        environment = {name: value for name, value in os.environ.items() if name not in EXCLUDED_VARIABLES}
        self._process = process = subprocess.Popen(  # noqa: S603 - our own command
            [*self._command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, start_new_session=True
        )
        self._reader = threading.Thread(target=self._read, args=(process,), name="quire-watched-member", daemon=True)
        self._reader.start()
        if process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(encode_spec(self._spec))
                process.stdin.flush()  # stdin stays open: when it closes, the member exits
        self._first_status.wait()
        if self.status is None:
            code = process.wait()
            self.end()
            raise EngineDeadError(f"a member exited with code {code} before it was ready; see its output above")
        return self.status

    def problem(self, now_s: float | None = None) -> str:
        """Return why the process should be replaced; empty if it is healthy."""
        if self._process is None:
            return "it was not started"
        code = self._process.poll()
        if code is not None:
            return f"it exited with code {code}"
        silent_s = (monotonic() if now_s is None else now_s) - self._last_status_s
        if silent_s > MAX_SILENT_S:
            return f"expected a status line every second, got none for {silent_s:.0f} s"
        return ""

    def end(self) -> None:
        """Let the member finish its requests; kill it if it exceeds its time limit."""
        process = self._process
        if process is None:
            return
        process.terminate()
        try:
            process.wait(self._spec.drain_s + END_S)
        except subprocess.TimeoutExpired:
            log.warning("member %s did not exit in time; killing it", process.pid)
            process.kill()
            process.wait()
        if process.stdin is not None:
            process.stdin.close()
        if self._reader is not None:
            self._reader.join(END_S)

    def _read(self, process: "subprocess.Popen[bytes]") -> None:
        if process.stdout is not None:
            with process.stdout as lines:
                for line in lines:
                    self._take_line(line)
        self._first_status.set()

    def _take_line(self, line: bytes) -> None:
        try:
            self.status = decode_status(line)
        except MessageError as error:
            log.warning("%s", error)
            return
        self._last_status_s = monotonic()
        self._first_status.set()
