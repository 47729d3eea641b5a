"""A small thread pool for processing text, shared fairly between tenants. It accepts any callable.

Clients can cause any amount of parsing, rendering and tokenization. In a single FIFO queue, the tenant with the most
requests would delay all other tenants. In this pool each tenant has at most one thread, and waiting tenants take turns:

    run(tenant, work) ─► queue of the tenant ─► next tenant in turn without running work ─► a thread

Cancelling a caller removes its waiting work. Running work keeps its thread, and its tenant's turn, until it returns; it
checks between pieces whether the client has disconnected (`text_work`). Its cost is charged to its tenant.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

from quire.errors import QueueFullError
from quire.text.text_work import TextBudget, run_charged

T = TypeVar("T")
NUM_THREADS = 2
"""The tokenizer library releases the GIL, so the work of two tenants runs in parallel."""
MAX_WAITING = 4096
"""The API server bounds open requests itself; this bound is for programs without a server."""


Task = tuple[Callable[[], Any], "asyncio.Future[Any]"]
"""The work, and the future that its caller awaits. The future is cancelled when the caller is cancelled."""


class TextPool:
    """A bounded executor in which tenants take turns. Used from one event loop."""

    def __init__(self, num_threads: int = NUM_THREADS, max_waiting: int = MAX_WAITING) -> None:
        self._num_threads = num_threads
        self._max_waiting = max_waiting
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="quire-text")
        self._running: set[str] = set()
        """Tenants with work in a thread."""
        self._waiting: dict[str, deque[Task]] = {}
        """Waiting tasks by tenant, in the order of turns; a tenant without tasks has no entry."""
        self._end_waiters: dict[str, list[asyncio.Future[None]]] = {}
        self.budget = TextBudget()

    @property
    def num_waiting(self) -> int:
        return sum(map(len, self._waiting.values()))

    async def run(self, tenant: str, work: Callable[[], T]) -> T:
        """Run work in a thread in this tenant's turn. Returns its result; raises its error, or QueueFullError."""
        if (num_waiting := self.num_waiting) >= self._max_waiting:
            raise QueueFullError(num_waiting, self._max_waiting)
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        task = work, future
        self._waiting.setdefault(tenant, deque()).append(task)
        self._start_next()
        try:
            return await future
        except asyncio.CancelledError:
            self._remove_task(tenant, task)
            raise

    async def pause(self, tenant: str) -> None:
        """Wait until this tenant has no work in a thread.

        Such work holds the GIL for milliseconds at a time. If the event loop also read more of a request of this tenant
        at the same time, all other tenants would wait for both.
        """
        if tenant in self._running:
            future = asyncio.get_running_loop().create_future()
            self._end_waiters.setdefault(tenant, []).append(future)
            await future

    def _start_next(self) -> None:
        """Start the work of the next tenants in turn, while threads are free."""
        while len(self._running) < self._num_threads:
            tenant = next((name for name in self._waiting if name not in self._running), None)
            if tenant is None:
                return
            tasks = self._waiting.pop(tenant)
            work, future = tasks.popleft()
            if tasks:
                self._waiting[tenant] = tasks  # reinserted last in the order of turns
            self._running.add(tenant)
            thread_future = self._threads.submit(run_charged, tenant, self.budget, future.cancelled, work)
            thread_future.add_done_callback(lambda result, t=tenant, a=future: self._on_loop(t, a, result))  # type: ignore[misc]

    def _on_loop(self, tenant: str, future: "asyncio.Future[Any]", result: "Future[Any]") -> None:
        with suppress(RuntimeError):  # the loop was closed, so no caller waits
            future.get_loop().call_soon_threadsafe(self._end, tenant, future, result)

    def _end(self, tenant: str, future: "asyncio.Future[Any]", result: "Future[Any]") -> None:
        self._running.discard(tenant)
        for waiter in self._end_waiters.pop(tenant, ()):
            if not waiter.done():
                waiter.set_result(None)
        if not future.done():
            error = result.exception()
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(result.result())
        self._start_next()

    def _remove_task(self, tenant: str, task: Task) -> None:
        tasks = self._waiting.get(tenant)
        if tasks is not None and task in tasks:
            tasks.remove(task)
            if not tasks:
                del self._waiting[tenant]
