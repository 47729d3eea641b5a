"""Where `quire serve` runs its models: each in a worker of its own, all within one memory budget."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quire.api.models import EngineStats
from quire.cli.background import in_background

if TYPE_CHECKING:
    from quire.api.serving import OpenClient
    from quire.checkpoints import Progress
    from quire.client.served import ServedModel, Serving
    from quire.config import Settings


@dataclass(frozen=True, slots=True)
class Supervised:
    """A worker and its replacements, seen from the API."""

    engine_client: "ServedModel"

    @property
    def is_ready(self) -> bool:
        """A worker is there, and its loop came round a moment ago."""
        return self.engine_client.is_ready

    def stats(self) -> EngineStats:
        """What the worker said with its last step."""
        ready, load, sizes = self.engine_client.ready, self.engine_client.load, self.engine_client.step_sizes
        return EngineStats(
            num_blocks=ready.num_blocks,
            block_size=ready.block_size,
            kv_usage=load.num_used_blocks / ready.num_blocks,
            num_preemptions=load.num_preemptions,
            num_steps=load.num_steps,
            num_computed_tokens=load.num_computed_tokens,
            num_restarts=self.engine_client.num_restarts,
            step_sizes=tuple(sizes.cumulative()),
            num_step_tokens=sizes.num_tokens,
        )

    async def clear_cache(self) -> None:
        """Forget every cached block that nobody uses."""
        self.engine_client.supervisor.clear_cache()


def supervised(models: Sequence[str], progress: "Progress") -> "OpenClient":
    """These models, planned together when the first is opened."""
    planned: dict[str, Serving] = {}

    @asynccontextmanager
    async def open_client(name: str, settings: "Settings") -> "AsyncIterator[tuple[ServedModel, Supervised]]":
        from quire.client.served import ServedModel, plan_workers

        if not planned:
            planning = in_background(
                lambda tell: plan_workers(models, settings.model, settings.serving, progress=tell), progress
            )
            servings = await asyncio.wrap_future(planning)
            planned.update(zip(models, servings, strict=True))
        async with ServedModel(lambda: planned[name]) as engine_client:
            yield engine_client, Supervised(engine_client)

    return open_client
