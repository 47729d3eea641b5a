"""Where `quire serve` runs its models: each in a worker of its own, all within one memory budget.

Who starts a server waits for it, so the first worker is spawned before anything else and imports on one core while this
process does on another; and it knows what to load before the API is imported:

    parent   spawn ─ import ─ plan ─ open ─► import the API, listen, read a tokenizer ─► ready
    worker     └──── import ───────────└───► load, measure ───────────────────────────────┘
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from quire.cli.background import in_background

if TYPE_CHECKING:
    from quire.api.serving import OpenClient
    from quire.checkpoints import Progress
    from quire.client.served import ServedModel
    from quire.config import Settings
    from quire.worker.spawned_worker import SpawnedWorker

T = TypeVar("T")
HEAD_START_S = 2.0
"""How long it may take until a worker knows what to load. A model that is downloaded takes longer, and who asks
meanwhile gets an answer."""


@asynccontextmanager
async def supervised(
    models: Sequence[str], settings: "Settings", progress: "Progress", first: "SpawnedWorker"
) -> "AsyncIterator[OpenClient]":
    """These models, planned together and loaded one after the other from now on; closed in the end.

    `first` is a worker for the first of them, which is on its way."""
    opener = _Opener(models, settings, progress, first)
    opening = asyncio.create_task(opener.open_all(), name="quire-open-models")

    @asynccontextmanager
    async def open_client(name: str, _settings: "Settings") -> "AsyncIterator[ServedModel]":
        opened = opener.opened[name]
        either: set[asyncio.Future[Any]] = {opened, opening}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not opened.done():
            opening.result()  # raises what stood in the way
        yield opened.result()

    try:
        with suppress(TimeoutError):
            await asyncio.wait_for(opener.is_begun.wait(), HEAD_START_S)
        yield open_client
    finally:
        opener.closing.set()
        if all(one.done() for one in opener.opened.values()):
            await opening
        else:  # whoever ends the server while it loads does not wait for the model, nor hear of it
            opening.cancel()
            await asyncio.gather(opening, return_exceptions=True)


def _itself(thing: T) -> T:
    return thing


class _Opener:
    """Opens models, keeps them, and closes them when asked to. Workers belong to the thread that does so."""

    def __init__(
        self, models: Sequence[str], settings: "Settings", progress: "Progress", first: "SpawnedWorker"
    ) -> None:
        self._models, self._settings, self._progress = models, settings, progress
        self._workers = [first, *[None] * (len(models) - 1)]
        loop = asyncio.get_running_loop()
        self.opened: dict[str, asyncio.Future[ServedModel]] = {name: loop.create_future() for name in models}
        self.is_begun = asyncio.Event()
        """The first worker knows what to load, or there will be none."""
        self.closing = asyncio.Event()

    async def open_all(self) -> None:
        """Until asked to close. Raises what stands in the way of a model."""
        from quire.client.served import ServedModel, plan_workers

        settings = self._settings
        try:
            planning = in_background(
                lambda tell: plan_workers(self._models, settings.model, settings.serving, progress=tell),
                self._progress,
            )
            servings = await asyncio.wrap_future(planning)
            async with AsyncExitStack() as stack:
                for name, serving, worker in zip(self._models, servings, self._workers, strict=True):
                    model = ServedModel(partial(_itself, serving), self.is_begun.set, worker)
                    self.opened[name].set_result(await stack.enter_async_context(model))
                await self.closing.wait()
        finally:
            self.is_begun.set()
