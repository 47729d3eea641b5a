"""The server's side of helper processes: started when there is work, loaded once, killed when one takes too long.

    turn ─► request: a free helper, or a new one that is loaded first ─► free again, or killed

A helper works for one thread at a time. What takes longer than it may is killed with its process, and the next request
starts another. Threads take turns in the order in which they came.
"""

import atexit
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

from quire.errors import CapacityError, EngineDeadError
from quire.text.sandboxed.helper import Helper, StoppedError

T = TypeVar("T")


class NotLoadedError(StoppedError):
    """It was what a helper is loaded with that took too long, or broke it."""


class IdleHelpers:
    """Helpers between two models: starting one costs more than a hundred renderings."""

    def __init__(self, module: str, purpose: str, most: int = 0) -> None:
        self.command: tuple[str, ...] = (sys.executable, "-m", module)
        self._purpose = purpose
        self._most = most
        self._idle: list[Helper] = []
        # An owner that is collected as garbage gives its helpers back, in the middle of whatever its thread does.
        self._lock = threading.RLock()
        atexit.register(self.kill_all)

    def take(self) -> Helper:
        """One that waits, or a new one. Raises CapacityError if none can be started."""
        with self._lock:
            helper = _pop_alive(self._idle)
        try:
            return helper or Helper(self.command)
        except OSError as error:
            why = f"cannot start a process {self._purpose}: {error.strerror or error}; try again"
            raise CapacityError(why, code="process_not_started") from None

    def give_back(self, helper: Helper) -> None:
        """Its model no longer needs it."""
        with self._lock:
            if len(self._idle) < self._most:
                self._idle.append(helper)
                return
        helper.kill()

    def kill_all(self) -> None:
        """At the end of this process."""
        with self._lock:
            idle, self._idle = self._idle, []
        for helper in idle:
            helper.kill()


class HelperPool(Generic[T]):
    """The helpers of one model, at most so many, loaded with the same frame. Safe from several threads. Close it."""

    def __init__(
        self, idle: IdleHelpers, load: Callable[[], bytes], decode: Callable[[bytes], T], load_s: float, most: int = 1
    ) -> None:
        self._idle = idle
        self._load = load
        self._decode = decode
        self._load_s = load_s
        self._most = most
        self._changed = threading.Condition()
        self._turns: list[object] = []
        """Of those that have one, at most so many, and behind them of those that wait."""
        self._free: list[Helper] = []
        self._busy: set[Helper] = set()
        self._is_closed = False

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Be one of the threads that may use a helper. Raises EngineDeadError if the pool is closed."""
        ticket = object()
        with self._changed:
            self._turns.append(ticket)
        try:
            with self._changed:
                self._changed.wait_for(lambda: self._is_closed or ticket in self._turns[: self._most])
                self._check_open()
            yield
        finally:
            with self._changed:
                self._turns.remove(ticket)
                self._changed.notify_all()

    def request(self, frame: bytes, time_s: float) -> T:
        """A helper's answer; only within a turn. Raises StoppedError, or as `load` and `turn`."""
        with self._changed:
            helper = _pop_alive(self._free)
        load = self._load() if helper is None else None
        with self._use(helper or self._idle.take()) as used:
            if load is not None:
                self._loaded(used, load)
            return used.request(frame, self._decode, time_s)

    def load(self) -> T:
        """Start a helper and return its answer to what it is loaded with. Raises NotLoadedError, CapacityError."""
        load = self._load()
        with self._use(self._idle.take()) as helper:
            return self._loaded(helper, load)

    def close(self) -> None:
        """The model is closed: what helpers do ends at once."""
        with self._changed:
            self._is_closed = True
            free, self._free = self._free, []
            for helper in self._busy:
                helper.stop()
            self._changed.notify_all()
        for helper in free:
            self._idle.give_back(helper)

    def _loaded(self, helper: Helper, load: bytes) -> T:
        try:
            return helper.request(load, self._decode, self._load_s)
        except StoppedError as error:
            raise NotLoadedError(str(error)) from None

    @contextmanager
    def _use(self, helper: Helper) -> Iterator[Helper]:
        """It is free again afterwards, unless something went wrong."""
        try:
            with self._changed:
                self._check_open()
                self._busy.add(helper)
            yield helper
        except BaseException as error:
            helper.kill()
            if isinstance(error, StoppedError):
                self._check_open()
            raise
        finally:
            with self._changed:
                self._busy.discard(helper)
                if helper.is_alive and not self._is_closed:
                    self._free.append(helper)
                else:
                    helper.kill()

    def _check_open(self) -> None:
        if self._is_closed:
            raise EngineDeadError("the model is closed; open it again")


def _pop_alive(helpers: list[Helper]) -> Helper | None:
    """The system may have ended others for its own reasons."""
    while helpers:
        helper = helpers.pop()
        if helper.is_alive:
            return helper
        helper.kill()
    return None
