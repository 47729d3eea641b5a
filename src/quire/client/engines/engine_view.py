"""A model as its watchers see it: snapshots and block facts, passed to the event loop from whatever thread."""

import asyncio
from collections.abc import Callable, Sequence

from quire.core.inspect.snapshots import BlockFacts, EngineSnapshot
from quire.engine.port import WatchPort, WorkerRecord
from quire.errors import CapacityError, QuireError

__all__ = ["EngineView", "WorkerRecord"]

MAX_QUERIES = 16
"""Block queries of one model under way at once: each delays its steps for a moment."""

OnLoop = Callable[..., None]
"""Calls the first argument with the others, on the event loop."""


class EngineView:
    """One model's port, watched from one event loop."""

    def __init__(self, port: WatchPort, on_loop: OnLoop) -> None:
        self._port = port
        self._on_loop = on_loop
        self._queries: set[asyncio.Future[BlockFacts | QuireError | None]] = set()

    @property
    def workers(self) -> Sequence[WorkerRecord]:
        """Of its workers, if it has any."""
        return self._port.workers

    def watch(self, show: Callable[[EngineSnapshot], None], period_s: float) -> None:
        """Show a snapshot so often, until `unwatch`; one or two may come after that."""
        self._port.watch(lambda snapshot: self._on_loop(show, snapshot), period_s)

    def unwatch(self) -> None:
        """Stop the snapshots."""
        self._port.unwatch()

    async def block(self, block_id: int) -> BlockFacts | None:
        """Facts of a block; None: there is no such block. Raises CapacityError, or the engine's error."""
        if len(self._queries) >= MAX_QUERIES:
            raise CapacityError(
                f"expected at most {MAX_QUERIES} block queries of a model, {len(self._queries)} are waiting; try again"
            )
        answer: asyncio.Future[BlockFacts | QuireError | None] = asyncio.get_running_loop().create_future()
        self._queries.add(answer)
        answer.add_done_callback(self._queries.discard)
        self._port.request_block(block_id, lambda facts: self._on_loop(_set, answer, facts))
        facts = await asyncio.shield(answer)
        if isinstance(facts, QuireError):
            raise facts
        return facts


def _set(answer: "asyncio.Future[BlockFacts | QuireError | None]", facts: BlockFacts | QuireError | None) -> None:
    """Whether or not the caller still waits."""
    if not answer.done():
        answer.set_result(facts)
