"""A background thread for slow grammar work, so that no step waits for it.

    put ─► waiting, by tenant ─► the tenant with the least processor time so far ─► one piece ─► take

One piece of work runs at a time, at a lower priority than steps; the grammar library releases the GIL meanwhile. A
piece is a function. Until `take` returns the piece, only the function may use the objects that it works on.
"""

import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from time import thread_time

NICENESS = 10
"""With this nice value, the thread gets about a tenth of a core that it shares with a step."""
MAX_TENANTS = 1024
"""Limit on the tenants with recorded processor time; beyond it, tenants without waiting pieces are dropped."""


@dataclass(eq=False, slots=True)
class ThreadWork:
    """One piece of work, and its processor time."""

    tenant: str
    request_id: str
    """The request that is reported as in flight if the worker dies during this piece."""
    work: Callable[[], None]
    finish: Callable[["ThreadWork"], None]
    """Called by the owner on its own thread, after `take`."""
    owner: object = None
    """Key for `GrammarThread.remove`."""
    is_brief: bool = True
    """Whether the piece is expected to finish quickly, so that a step may wait briefly for it."""
    seconds: float = 0.0
    error: BaseException | None = None


def lower_thread_priority() -> None:
    """Lower the priority of the calling thread and of threads it starts later. Raising it again needs privileges."""
    with contextlib.suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)


class GrammarThread:
    """Runs pieces of work for one engine, which calls `put`, `take` and `close`. Starts with the first piece."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: dict[str, deque[ThreadWork]] = {}
        """Waiting pieces by tenant; a tenant without pieces is not listed."""
        self._used_s: dict[str, float] = {}
        """Processor seconds by tenant; a tenant that starts to wait is raised to the least of the waiting tenants."""
        self._running: ThreadWork | None = None
        self._finished: list[ThreadWork] = []
        self._num_brief = 0
        """Number of unfinished pieces that are expected to be brief."""
        self._thread: threading.Thread | None = None
        self._is_closed = False

    @property
    def is_idle(self) -> bool:
        """Whether no piece is waiting, running or ready to be taken."""
        return not (self._waiting or self._running or self._finished)

    @property
    def request_ids(self) -> list[str]:
        """The request of the running piece, as a list of at most one id."""
        running = self._running
        return [] if running is None else [running.request_id]

    def put(self, piece: ThreadWork) -> None:
        """Queue a piece of work; it runs when it is its tenant's turn."""
        with self._changed:
            if piece.tenant not in self._waiting:
                min_s = min((self._used_s[tenant] for tenant in self._waiting), default=0.0)
                self._used_s[piece.tenant] = max(min_s, self._used_s.get(piece.tenant, 0.0))
            self._waiting.setdefault(piece.tenant, deque()).append(piece)
            self._num_brief += piece.is_brief
            if self._thread is None and not self._is_closed:
                self._thread = threading.Thread(target=self._run, name="quire-grammars", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def remove(self, owner: object) -> None:
        """Drop the waiting pieces with this `owner`, for example because the client has disconnected."""
        with self._changed:
            for tenant, pieces in list(self._waiting.items()):
                for piece in [candidate for candidate in pieces if candidate.owner is owner]:
                    pieces.remove(piece)
                    self._num_brief -= piece.is_brief
                if not pieces:
                    del self._waiting[tenant]
            self._changed.notify_all()

    def take(self) -> list[ThreadWork]:
        """Return the pieces that have finished since the last call."""
        with self._changed:
            finished, self._finished = self._finished, []
        return finished

    def wait_for_brief(self, timeout_s: float) -> None:
        """Wait until no brief piece is unfinished, or until the timeout."""
        with self._changed:
            self._changed.wait_for(lambda: self._num_brief == 0, timeout_s)

    def wait_for_any(self, timeout_s: float) -> None:
        """Wait until a piece can be taken or none is left, or until the timeout."""
        with self._changed:
            self._changed.wait_for(lambda: self._finished or not (self._waiting or self._running), timeout_s)

    def close(self) -> None:
        """Start no further pieces; the running piece finishes."""
        with self._changed:
            self._is_closed = True
            self._waiting.clear()
            self._changed.notify_all()

    def _run(self) -> None:
        lower_thread_priority()
        while (piece := self._next()) is not None:
            started_s = thread_time()
            try:
                piece.work()
            except BaseException as error:  # includes a Rust panic of the library; the owner handles it
                piece.error = error
            piece.seconds = thread_time() - started_s
            self._end(piece)

    def _next(self) -> ThreadWork | None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._is_closed)
            if self._is_closed:
                return None
            tenant = min(self._waiting, key=lambda name: self._used_s[name])
            pieces = self._waiting[tenant]
            self._running = pieces.popleft()
            if not pieces:
                del self._waiting[tenant]
            return self._running

    def _end(self, piece: ThreadWork) -> None:
        with self._changed:
            self._used_s[piece.tenant] = self._used_s.get(piece.tenant, 0.0) + piece.seconds
            if len(self._used_s) > MAX_TENANTS or not self._waiting:
                self._used_s = {tenant: self._used_s[tenant] for tenant in self._waiting}
            self._running = None
            self._num_brief -= piece.is_brief
            self._finished.append(piece)
            self._changed.notify_all()
