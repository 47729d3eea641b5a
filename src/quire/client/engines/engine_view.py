"""A model as those see it who watch: snapshots and answers, heard on the event loop whatever thread they come on."""

import asyncio
from collections.abc import Callable, Sequence

from quire.core.inspect.snapshots import BlockFacts, EngineSnapshot
from quire.engine.port import WatchPort, WorkerRecord
from quire.errors import CapacityError, QuireError

__all__ = ["EngineView", "WorkerRecord"]

MAX_QUESTIONS = 16
"""About blocks of one model, under way at once: each holds up the steps of everybody for a moment."""

OnLoop = Callable[..., None]
"""Calls the first argument with the others, on the event loop."""


class EngineView:
    """One model's port, looked through from one event loop."""

    def __init__(self, port: WatchPort, on_loop: OnLoop) -> None:
        self._port = port
        self._on_loop = on_loop
        self._questions: set[asyncio.Future[BlockFacts | QuireError | None]] = set()

    @property
    def workers(self) -> Sequence[WorkerRecord]:
        """Of its workers, if it has any."""
        return self._port.workers

    def watch(self, show: Callable[[EngineSnapshot], None], period_s: float) -> None:
        """Show a snapshot so often, until `unwatch`; one or two may come after that."""
        self._port.watch(lambda snapshot: self._on_loop(show, snapshot), period_s)

    def unwatch(self) -> None:
        """Nobody looks any more."""
        self._port.unwatch()

    async def block(self, block_id: int) -> BlockFacts | None:
        """What is known of a block; None: there is no such block. Raises what stands in the way."""
        if len(self._questions) >= MAX_QUESTIONS:
            raise CapacityError(
                f"{MAX_QUESTIONS} blocks of a model are asked about at once, {len(self._questions)} are; ask again"
            )
        answer: asyncio.Future[BlockFacts | QuireError | None] = asyncio.get_running_loop().create_future()
        self._questions.add(answer)
        answer.add_done_callback(self._questions.discard)
        self._port.ask_block(block_id, lambda told: self._on_loop(_set, answer, told))
        told = await asyncio.shield(answer)
        if isinstance(told, QuireError):
            raise told
        return told


def _set(answer: "asyncio.Future[BlockFacts | QuireError | None]", told: BlockFacts | QuireError | None) -> None:
    """Whether or not anybody still waits."""
    if not answer.done():
        answer.set_result(told)
