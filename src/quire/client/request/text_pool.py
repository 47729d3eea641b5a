"""Where text is worked on: a few threads of its own, shared between tenants. Independent of what the work is.

Parsing, rendering, tokenising and writing text are work that a client can cause at will. In one queue for all, the
tenant that sends most is served most and all others wait behind it. Here one tenant has one thread at most, waiting
tenants take turns, and a thread is always within reach of another tenant:

    run(tenant, work) ─► waiting, by tenant ─► the next tenant in turn that has nothing running ─► a thread

A caller that is cancelled while it waits leaves. Work that has begun keeps its thread, and its tenant's turn, until it
ends; it sees that its client has left (`text_work`), and ends before its next piece. Its cost is charged to its tenant.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

from quire.errors import QueueFullError
from quire.text.text_work import TextBudget, TextWork

T = TypeVar("T")
NUM_THREADS = 2
"""The libraries let go of the interpreter's lock while they tokenise, so two tenants really work at once."""
MAX_WAITING = 4096
"""A server bounds its open requests first; this bound is for callers without a server."""


Task = tuple[Callable[[], Any], "asyncio.Future[Any]", TextWork]
"""What is done, what its caller awaits of it, and the account that pays."""


class TextPool:
    """A bounded executor with turns. Used from one event loop."""

    def __init__(self, num_threads: int = NUM_THREADS, max_waiting: int = MAX_WAITING) -> None:
        self._num_threads = num_threads
        self._max_waiting = max_waiting
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="quire-text")
        self._running: set[str] = set()
        """Tenants that have a thread."""
        self._waiting: dict[str, deque[Task]] = {}
        """By tenant, in the order of their turns; no tenant is listed without a task."""
        self._until_end: dict[str, list[asyncio.Future[None]]] = {}
        self.budget = TextBudget()

    @property
    def num_waiting(self) -> int:
        return sum(map(len, self._waiting.values()))

    async def run(self, tenant: str, work: Callable[[], T]) -> T:
        """What the work returns or raises, done in a thread when it is this tenant's turn."""
        if (num_waiting := self.num_waiting) >= self._max_waiting:
            raise QueueFullError(num_waiting, self._max_waiting)
        awaited: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        task = work, awaited, TextWork(tenant, self.budget)
        self._waiting.setdefault(tenant, deque()).append(task)
        self._begin()
        try:
            return await awaited
        except asyncio.CancelledError:
            self._leave(tenant, task)
            raise

    async def pause(self, tenant: str) -> None:
        """Wait for the end of what this tenant has in a thread, if it has anything there.

        Work in a thread takes the interpreter's lock from the event loop for milliseconds at a time. A caller that
        keeps the loop busy for a tenant meanwhile, as by reading more of its text, makes all others wait for that.
        """
        if tenant in self._running:
            ended = asyncio.get_running_loop().create_future()
            self._until_end.setdefault(tenant, []).append(ended)
            await ended

    def _begin(self) -> None:
        """Give free threads to the tenants whose turn it is."""
        while len(self._running) < self._num_threads:
            tenant = next((one for one in self._waiting if one not in self._running), None)
            if tenant is None:
                return
            tasks = self._waiting.pop(tenant)
            work, awaited, payer = tasks.popleft()
            if tasks:
                self._waiting[tenant] = tasks  # behind all other tenants that wait
            self._running.add(tenant)
            done = self._threads.submit(payer.run, work)
            done.add_done_callback(lambda result, t=tenant, a=awaited: self._on_loop(t, a, result))  # type: ignore[misc]

    def _on_loop(self, tenant: str, awaited: "asyncio.Future[Any]", result: "Future[Any]") -> None:
        with suppress(RuntimeError):  # the loop was closed: no caller is left
            awaited.get_loop().call_soon_threadsafe(self._end, tenant, awaited, result)

    def _end(self, tenant: str, awaited: "asyncio.Future[Any]", result: "Future[Any]") -> None:
        self._running.discard(tenant)
        for waiting in self._until_end.pop(tenant, ()):
            if not waiting.done():
                waiting.set_result(None)
        if not awaited.done():
            error = result.exception()
            if error is not None:
                awaited.set_exception(error)
            else:
                awaited.set_result(result.result())
        self._begin()

    def _leave(self, tenant: str, task: Task) -> None:
        task[2].is_left = True
        tasks = self._waiting.get(tenant)
        if tasks is not None and task in tasks:
            tasks.remove(task)
            if not tasks:
                del self._waiting[tenant]
