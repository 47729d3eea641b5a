"""Where `quire serve` runs a model: the one place to change when that changes."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quire.api.models import EngineStats

if TYPE_CHECKING:
    from quire.api.serving import OpenFront
    from quire.checkpoints import Progress
    from quire.config import Settings
    from quire.engine.async_engine import AsyncEngine
    from quire.engine.engine import Engine


@dataclass(frozen=True, slots=True)
class InProcess:
    """An engine in this process, seen from the doors. Its counters are read beside the thread that moves them."""

    engine: "Engine"
    front: "AsyncEngine"

    @property
    def is_ready(self) -> bool:
        """It lives."""
        return self.front.is_alive

    def stats(self) -> EngineStats:
        """What its memory and its scheduler count."""
        pool, totals = self.engine.memory.pool, self.engine.scheduler.stats
        return EngineStats(
            num_blocks=pool.num_blocks,
            block_size=self.engine.memory.config.block_size,
            kv_usage=pool.num_referenced / pool.num_blocks,
            num_preemptions=totals.num_preemptions,
            num_steps=totals.num_steps,
            num_computed_tokens=totals.num_computed_tokens,
        )


def in_process(progress: "Progress") -> "OpenFront":
    """Models run in a thread of this process."""

    @asynccontextmanager
    async def open_front(name: str, settings: "Settings") -> "AsyncIterator[tuple[AsyncEngine, InProcess]]":
        from quire.engine.async_engine import AsyncEngine
        from quire.engine.opening import open_model

        opened = await asyncio.to_thread(open_model, name, settings.model, serving=settings.serving, progress=progress)
        async with AsyncEngine(opened) as front:
            yield front, InProcess(opened.engine, front)

    return open_front
