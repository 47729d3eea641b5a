"""The thread beside the steps: what may take long of grammars is done here, so that no step waits for it.

    put ─► waiting, by tenant ─► the tenant that has had the least time ─► one piece ─► take

One piece runs at a time, with a priority below the steps'. The libraries let go of the interpreter's lock meanwhile.
Knows nothing of what the work is; a piece must touch nothing that its owner touches before it has taken it back.
"""

import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from time import thread_time

NICENESS = 10
"""Of a core that a step wants too, about a tenth is left for this."""
MAX_TENANTS = 1024
"""Of which it is known what they have had; beyond that only of those who wait."""


@dataclass(eq=False, slots=True)
class ThreadWork:
    """Work that is done in one go, and how long it took."""

    tenant: str
    request_id: str
    """Named when a worker dies while it is under way."""
    work: Callable[[], None]
    finish: Callable[["ThreadWork"], None]
    """Called by the owner when it has taken the piece back."""
    owner: object = None
    """By which it can be removed."""
    is_brief: bool = True
    """Expected to be done at once, so that a step may wait a moment for it."""
    seconds: float = 0.0
    error: BaseException | None = None


class GrammarThread:
    """For one owner, who puts, takes and closes. The thread begins with the first piece."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: dict[str, deque[ThreadWork]] = {}
        """By tenant; none is listed without a piece."""
        self._had_s: dict[str, float] = {}
        """The time that those who wait have had; one that comes anew begins with the least of the others."""
        self._running: ThreadWork | None = None
        self._done: list[ThreadWork] = []
        self._num_brief = 0
        """Pieces that are not done, of those that are expected to be brief."""
        self._thread: threading.Thread | None = None
        self._is_closed = False

    @property
    def is_idle(self) -> bool:
        """Nothing is under way, and nothing waits to be taken."""
        return not (self._waiting or self._running or self._done)

    @property
    def request_ids(self) -> list[str]:
        """The request whose piece is under way, if one is."""
        running = self._running
        return [] if running is None else [running.request_id]

    def put(self, piece: ThreadWork) -> None:
        """Have this done when it is its tenant's turn."""
        with self._changed:
            if piece.tenant not in self._waiting:
                least = min((self._had_s[tenant] for tenant in self._waiting), default=0.0)
                self._had_s[piece.tenant] = max(least, self._had_s.get(piece.tenant, 0.0))
            self._waiting.setdefault(piece.tenant, deque()).append(piece)
            self._num_brief += piece.is_brief
            if self._thread is None and not self._is_closed:
                self._thread = threading.Thread(target=self._run, name="quire-grammars", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def remove(self, owner: object) -> None:
        """A client has left: what has not begun is not done."""
        with self._changed:
            for tenant, pieces in list(self._waiting.items()):
                for piece in [one for one in pieces if one.owner is owner]:
                    pieces.remove(piece)
                    self._num_brief -= piece.is_brief
                if not pieces:
                    del self._waiting[tenant]
            self._changed.notify_all()

    def take(self) -> list[ThreadWork]:
        """What is done by now."""
        with self._changed:
            done, self._done = self._done, []
        return done

    def wait_for_brief(self, timeout_s: float) -> None:
        """Until nothing that was expected to be brief is left, or for so long."""
        with self._changed:
            self._changed.wait_for(lambda: self._num_brief == 0, timeout_s)

    def wait_for_any(self, timeout_s: float) -> None:
        """Until something can be taken, or for so long."""
        with self._changed:
            self._changed.wait_for(lambda: self._done or not (self._waiting or self._running), timeout_s)

    def close(self) -> None:
        """Begin nothing more; what is under way is left to end."""
        with self._changed:
            self._is_closed = True
            self._waiting.clear()
            self._changed.notify_all()

    def _run(self) -> None:
        with contextlib.suppress(OSError, AttributeError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        while (piece := self._next()) is not None:
            started_s = thread_time()
            try:
                piece.work()
            except BaseException as error:  # a panic of the library is one: its owner sees to it
                piece.error = error
            piece.seconds = thread_time() - started_s
            self._end(piece)

    def _next(self) -> ThreadWork | None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._is_closed)
            if self._is_closed:
                return None
            tenant = min(self._waiting, key=lambda name: self._had_s[name])
            pieces = self._waiting[tenant]
            self._running = pieces.popleft()
            if not pieces:
                del self._waiting[tenant]
            return self._running

    def _end(self, piece: ThreadWork) -> None:
        with self._changed:
            self._had_s[piece.tenant] = self._had_s.get(piece.tenant, 0.0) + piece.seconds
            if len(self._had_s) > MAX_TENANTS or not self._waiting:
                self._had_s = {tenant: self._had_s[tenant] for tenant in self._waiting}
            self._running = None
            self._num_brief -= piece.is_brief
            self._done.append(piece)
            self._changed.notify_all()
