"""Where `quire serve` runs its models: each in a worker of its own, all within one memory budget."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from quire.cli.background import in_background

if TYPE_CHECKING:
    from quire.api.serving import OpenClient
    from quire.checkpoints import Progress
    from quire.client.served import ServedModel, Serving
    from quire.config import Settings


def supervised(models: Sequence[str], progress: "Progress") -> "OpenClient":
    """These models, planned together when the first is opened."""
    planned: dict[str, Serving] = {}

    @asynccontextmanager
    async def open_client(name: str, settings: "Settings") -> "AsyncIterator[ServedModel]":
        from quire.client.served import ServedModel, plan_workers

        if not planned:
            planning = in_background(
                lambda tell: plan_workers(models, settings.model, settings.serving, progress=tell), progress
            )
            servings = await asyncio.wrap_future(planning)
            planned.update(zip(models, servings, strict=True))
        async with ServedModel(lambda: planned[name]) as engine_client:
            yield engine_client

    return open_client
