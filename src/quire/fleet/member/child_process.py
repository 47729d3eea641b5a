"""A member in a process of its own, for its supervisor: start it, check its health, end it.

    this process ── what to load ──► stdin ─ member ─ worker
                 ◄── each second ─── stdout ─┘

Works without an event loop: a thread reads the status lines. When this process ends, the member's standard input
closes, and it drains and exits by itself.
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
from quire.fleet.member.replicas import END_S, REPLICA, ReplicaOrder, packed_order
from quire.fleet.member.status import MemberStatus, decode_status

log = logging.getLogger("quire.fleet")

SILENT_S = 10.0
"""A member that sent no status line for so long is unhealthy: it sends one each second."""
NOT_FOR_CHILDREN = ("OMP_NUM_THREADS",)
"""Control planes set it for their own processes; a member's threads are a setting of quire's."""


class WatchedMember:
    """One process of a member."""

    def __init__(self, order: ReplicaOrder, command: Sequence[str] = REPLICA) -> None:
        self._order = msgspec.structs.replace(order, reports_status=True)
        self._command = command
        self._process: subprocess.Popen[bytes] | None = None
        self._reader: threading.Thread | None = None
        self._first_status = threading.Event()
        """The first status line has come, or none will any more."""
        self._last_status_s = monotonic()
        self.status: MemberStatus | None = None
        """The latest."""

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def start(self) -> MemberStatus:
        """Wait until it is ready: a model may take minutes to load. Raises EngineDeadError if it exits before."""
        environ = {name: value for name, value in os.environ.items() if name not in NOT_FOR_CHILDREN}
        self._process = process = subprocess.Popen(  # noqa: S603 - our own command
            [*self._command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environ, start_new_session=True
        )
        self._reader = threading.Thread(target=self._read, args=(process,), name="quire-watched-member", daemon=True)
        self._reader.start()
        if process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(packed_order(self._order))
                process.stdin.flush()  # and it stays open: this is the leash
        self._first_status.wait()
        if self.status is None:
            code = process.wait()
            self.end()
            raise EngineDeadError(f"a member exited with code {code} before it was ready; see its output above")
        return self.status

    def problem(self, now_s: float | None = None) -> str:
        """Why it should be replaced; empty if it is healthy."""
        if self._process is None:
            return "it was not started"
        code = self._process.poll()
        if code is not None:
            return f"it exited with code {code}"
        silent_s = (monotonic() if now_s is None else now_s) - self._last_status_s
        if silent_s > SILENT_S:
            return f"expected a status line every second, got none for {silent_s:.0f} s"
        return ""

    def end(self) -> None:
        """Let it finish its requests; kill it after its time limit."""
        process = self._process
        if process is None:
            return
        process.terminate()
        try:
            process.wait(self._order.drain_s + END_S)
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
