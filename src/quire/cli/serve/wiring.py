"""Where `quire serve` runs its models: each in a worker of its own, all within one memory budget.

Who starts a server waits for it, so the first worker is spawned before anything else and imports on one core while this
process does on another; and it knows what to load before the API is imported:

    parent   spawn ─ import ─ plan ─ open ─► import the API, listen, read a tokenizer ─► ready
    worker     └──── import ───────────└───► load, measure ───────────────────────────────┘
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from quire.checkpoints.progress import quiet, show_progress
from quire.cli.serve.model_traces import ModelTraces
from quire.cli.shared.background import in_background

if TYPE_CHECKING:
    from quire.api.models.model_park import OpenClient, Sizes, TellProgress, Weigh
    from quire.checkpoints import Progress
    from quire.client.engines.park_plan import ParkPlan
    from quire.client.engines.served import PrepareModel, ServedModel, Serving
    from quire.config import ParkedModel, Settings
    from quire.worker.parent.spawned_worker import SpawnedWorker

FileStamps = frozenset[tuple[str, int, int]]
HEAD_START_S = 2.0
"""How long it may take until a worker knows what to load. A model that is downloaded takes longer, and who asks
meanwhile gets an answer."""


def file_stamps(path: Path | None) -> FileStamps:
    """Whatever changes when a model's files do."""
    if path is None or not path.exists():
        return frozenset()
    files = [*path.iterdir()] if path.is_dir() else [path]
    return frozenset((file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files if file.is_file())


@dataclass(frozen=True, slots=True)
class Wiring:
    """What a server is handed: how to open a model, and how much each takes."""

    opening: "OpenClient"
    weigh: "Weigh"


@asynccontextmanager
async def supervised(
    models: "Sequence[ParkedModel]", settings: "Settings", first: "SpawnedWorker"
) -> AsyncIterator[Wiring]:
    """These models, planned together. The first that is kept is loaded from now on, by `first`, a worker that is on its
    way; whatever is open in the end is closed."""
    opener = _Opener(models, settings, first)
    try:
        with suppress(TimeoutError):
            await asyncio.wait_for(opener.is_begun.wait(), HEAD_START_S)
        yield Wiring(opener.opened, opener.weigh)
    finally:
        await opener.close()


class _Opener:
    """Opens models. Workers belong to the thread that does so."""

    def __init__(self, models: "Sequence[ParkedModel]", settings: "Settings", first: "SpawnedWorker") -> None:
        self._models, self._settings = models, settings
        self._worker: SpawnedWorker | None = first
        self._traces = ModelTraces(settings.server, models)
        self._prepared: dict[str, tuple[FileStamps, Serving]] = {}
        """Models that were here, as their files were then."""
        self._planning = asyncio.create_task(self._plan(), name="quire-plan-models")
        self.is_begun = asyncio.Event()
        """The first worker knows what to load, or there will be none."""
        kept = [one for one in models if one.is_kept][:1]
        self._early = {one.name: _Opening(self, one, quiet) for one in kept}
        if not kept:
            self.is_begun.set()

    async def _plan(self) -> "ParkPlan":
        from quire.client.engines.park_plan import plan_park

        with show_progress() as progress:
            planning = in_background(lambda tell: plan_park(self._models, self._settings.model, tell), progress)
            return await asyncio.wrap_future(planning)

    async def weigh(self) -> "Sizes":
        """What each model takes. Raises what stands in the way of a model that is kept."""
        from quire.api.models.model_park import Sizes

        plan = await asyncio.shield(self._planning)
        needed = {name: one.needed_bytes for name, one in plan.by_name.items()}
        problems = {name: one.problem for name, one in plan.by_name.items() if one.problem}
        return Sizes(plan.memory_bytes, needed, problems)

    @asynccontextmanager
    async def opened(self, model: "ParkedModel", tell: "TellProgress") -> "AsyncIterator[ServedModel]":
        """One model, for as long as it is needed."""
        opening = self._early.pop(model.name, None) or _Opening(self, model, tell)
        try:
            yield await asyncio.shield(opening.client)
        finally:
            await opening.close()

    @asynccontextmanager
    async def loaded(self, model: "ParkedModel", tell: "TellProgress") -> "AsyncIterator[ServedModel]":
        """A model that is there; its bar is gone by then."""
        with ExitStack() as shown:
            progress = shown.enter_context(show_progress())
            whose = f" of {model.name}" if len(self._models) > 1 else ""

            def both(label: str, done_bytes: int, total_bytes: int) -> None:
                tell(label, done_bytes, total_bytes)
                progress(f"{label}{whose}", done_bytes, total_bytes)

            async with await self.model(model, both) as client:
                shown.close()
                yield client

    async def model(self, model: "ParkedModel", progress: "Progress") -> "ServedModel":
        """One that is not entered yet."""
        from quire.client.engines.park_plan import settings_of
        from quire.client.engines.served import OwnSettings, ServedModel, plan_worker

        weighed = (await asyncio.shield(self._planning)).by_name[model.name]
        prepare = plan_worker(
            str(weighed.path),
            settings_of(model, self._settings.model, weighed.needed_bytes),
            self._settings.serving,
            own=OwnSettings(
                [one.name for one in self._models].index(model.name),
                model.sampling,
                not model.is_kept,
                self._traces.of(model.name),
            ),
            progress=progress,
        )
        worker, self._worker = self._worker, None
        return ServedModel(partial(self._as_before, model.name, weighed.path, prepare), self.is_begun.set, worker)

    def _as_before(self, name: str, path: Path | None, prepare: "PrepareModel") -> "Serving":
        """A model that comes back need not be read again, unless its files are others."""
        stamps = file_stamps(path)
        if name not in self._prepared or self._prepared[name][0] != stamps:
            self._prepared[name] = (stamps, prepare())
        return self._prepared[name][1]

    async def close(self) -> None:
        """End what nobody has asked for."""
        openings = [*self._early.values()]
        await asyncio.gather(*(opening.close() for opening in openings))
        self._planning.cancel()
        await asyncio.gather(self._planning, return_exceptions=True)


class _Opening:
    """One model from now on until it is closed, whoever waits for it meanwhile."""

    def __init__(self, opener: _Opener, model: "ParkedModel", tell: "TellProgress") -> None:
        self.client: asyncio.Future[ServedModel] = asyncio.get_running_loop().create_future()
        self._closing = asyncio.Event()
        self._task = asyncio.create_task(self._run(opener, model, tell), name=f"quire-open-{model.name}")

    async def _run(self, opener: _Opener, model: "ParkedModel", tell: "TellProgress") -> None:
        try:
            async with opener.loaded(model, tell) as client:
                self.client.set_result(client)
                await self._closing.wait()
        except BaseException as error:
            if self.client.done():
                raise
            self.client.set_exception(error)
            self.client.exception()  # nobody may ask for it any more
            if isinstance(error, asyncio.CancelledError):
                raise
        finally:
            opener.is_begun.set()

    async def close(self) -> None:
        """End it: whoever ends the server while it loads does not wait for the model, nor hear of it."""
        self._closing.set()
        if not self.client.done():
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        else:
            await self._task
