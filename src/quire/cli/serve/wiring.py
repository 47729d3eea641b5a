"""How `quire serve` runs its models: each in a separate worker process, all within one memory budget.

For a quick start, the first worker is spawned early, so that both processes import their modules in parallel. The
worker receives the model to load before this process (the parent) imports the API:

    parent   spawn ─ import ─ plan ─ open ─► import the API, listen, read a tokenizer ─► ready
    worker     └──── import ───────────└───► load, measure ───────────────────────────────┘
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from quire.checkpoints.progress import quiet, show_progress
from quire.cli.serve.model_traces import ModelTraces
from quire.cli.shared.background import in_background

if TYPE_CHECKING:
    from quire.api.models.model_park import ReportProgress, Sizes
    from quire.checkpoints import Progress
    from quire.client.engines.park_plan import ParkPlan
    from quire.client.engines.served import PrepareModel, ServedModel, Serving
    from quire.config import OnDemandModel, Settings
    from quire.worker.parent.spawned_worker import SpawnedWorker

FileStamps = frozenset[tuple[str, int, int]]
HEAD_START_S = 2.0
"""Timeout for planning the models and sending the first worker its model. A download may take longer; the server then
starts to respond before the download is complete."""


def file_stamps(path: Path | None) -> FileStamps:
    """Return the names, sizes and modification times of a model's files, to detect changes."""
    if path is None or not path.exists():
        return frozenset()
    files = [*path.iterdir()] if path.is_dir() else [path]
    return frozenset((file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files if file.is_file())


@asynccontextmanager
async def model_opener(
    models: "Sequence[OnDemandModel]", settings: "Settings", first: "SpawnedWorker"
) -> AsyncIterator["ModelOpener"]:
    """Plan these models together. `first`, a worker that is starting, loads the first model that stays loaded. On exit,
    open models are closed."""
    opener = ModelOpener(models, settings, first)
    try:
        with suppress(TimeoutError):
            await asyncio.wait_for(opener.has_begun.wait(), HEAD_START_S)
        yield opener
    finally:
        await opener.close()


class ModelOpener:
    """Opens models and computes their sizes. A worker may be used only by the thread that opened it."""

    def __init__(self, models: "Sequence[OnDemandModel]", settings: "Settings", first: "SpawnedWorker") -> None:
        self._models, self._settings = models, settings
        self._worker: SpawnedWorker | None = first
        self._traces = ModelTraces(settings.server, models)
        self._prepared: dict[str, tuple[FileStamps, Serving]] = {}
        """Prepared models by name, with the stamps of their files."""
        self._on_planning: ReportProgress = quiet
        """Receives the progress of planning, such as of a download, once a model is waited for."""
        self._planning = asyncio.create_task(self._plan(), name="quire-plan-models")
        self.has_begun = asyncio.Event()
        """Set when the first worker has received its model, or if no model is loaded at startup."""
        first_models = [model for model in models if model.is_kept][:1]
        self._startup_openings = {model.name: _Opening(self, model, quiet) for model in first_models}
        if not first_models:
            self.has_begun.set()

    async def _plan(self) -> "ParkPlan":
        from quire.client.engines.park_plan import plan_park

        with show_progress() as progress:

            def show(label: str, done_bytes: int, total_bytes: int) -> None:
                progress(label, done_bytes, total_bytes)
                self._on_planning(label, done_bytes, total_bytes)

            planning = in_background(lambda report: plan_park(self._models, self._settings.model, report), show)
            return await asyncio.wrap_future(planning)

    async def weigh(self) -> "Sizes":
        """Return the sizes of all models. Raises the error of a model that must stay loaded and cannot be planned."""
        from quire.api.models.model_park import Sizes

        plan = await asyncio.shield(self._planning)
        needed = {name: entry.needed_bytes for name, entry in plan.by_name.items()}
        problems = {name: entry.problem for name, entry in plan.by_name.items() if entry.problem}
        return Sizes(plan.memory_bytes, needed, problems)

    @asynccontextmanager
    async def open(self, model: "OnDemandModel", on_progress: "ReportProgress") -> "AsyncIterator[ServedModel]":
        """Open a model for the duration of this context. A model that loads since startup is only waited for."""
        self._on_planning = on_progress
        opening = self._startup_openings.pop(model.name, None) or _Opening(self, model, on_progress)
        opening.on_progress = on_progress
        try:
            yield await asyncio.shield(opening.client)
        finally:
            await opening.close()

    @asynccontextmanager
    async def load(self, model: "OnDemandModel", on_progress: "ReportProgress") -> "AsyncIterator[ServedModel]":
        """Load a model, close the progress bar, and yield the model."""
        with ExitStack() as stack:
            progress = stack.enter_context(show_progress())
            suffix = f" of {model.name}" if len(self._models) > 1 else ""

            def report(label: str, done_bytes: int, total_bytes: int) -> None:
                on_progress(label, done_bytes, total_bytes)
                progress(f"{label}{suffix}", done_bytes, total_bytes)

            async with await self.model(model, report) as client:
                stack.close()
                yield client

    async def model(self, model: "OnDemandModel", progress: "Progress") -> "ServedModel":
        """Build a model that is not loaded yet: entering its context loads it."""
        from quire.client.engines.park_plan import settings_of
        from quire.client.engines.served import ModelOptions, ServedModel, plan_worker

        entry = (await asyncio.shield(self._planning)).by_name[model.name]
        prepare = plan_worker(
            str(entry.path),
            settings_of(model, self._settings.model, entry.needed_bytes),
            self._settings.serving,
            options=ModelOptions(
                [listed.name for listed in self._models].index(model.name),
                model.sampling,
                not model.is_kept,
                self._traces.of(model.name),
            ),
            progress=progress,
        )
        worker, self._worker = self._worker, None
        return ServedModel(partial(self._prepare_once, model.name, entry.path, prepare), self.has_begun.set, worker)

    def _prepare_once(self, name: str, path: Path | None, prepare: "PrepareModel") -> "Serving":
        """Prepare a model, or reuse the earlier preparation if the model's files did not change."""
        stamps = file_stamps(path)
        if name not in self._prepared or self._prepared[name][0] != stamps:
            self._prepared[name] = (stamps, prepare())
        return self._prepared[name][1]

    async def close(self) -> None:
        """Close models that load since startup and were never requested, and cancel the planning."""
        openings = [*self._startup_openings.values()]
        await asyncio.gather(*(opening.close() for opening in openings))
        self._planning.cancel()
        await asyncio.gather(self._planning, return_exceptions=True)


class _Opening:
    """Opens one model in a separate task, which continues if a waiting caller is cancelled."""

    def __init__(self, opener: ModelOpener, model: "OnDemandModel", on_progress: "ReportProgress") -> None:
        self.client: asyncio.Future[ServedModel] = asyncio.get_running_loop().create_future()
        self.on_progress = on_progress
        """May be replaced while the model loads."""
        self._closing = asyncio.Event()
        self._task = asyncio.create_task(self._run(opener, model), name=f"quire-open-{model.name}")

    def _report(self, label: str, done_bytes: int, total_bytes: int) -> None:
        self.on_progress(label, done_bytes, total_bytes)

    async def _run(self, opener: ModelOpener, model: "OnDemandModel") -> None:
        try:
            async with opener.load(model, self._report) as client:
                self.client.set_result(client)
                await self._closing.wait()
        except BaseException as error:
            if self.client.done():
                raise
            self.client.set_exception(error)
            self.client.exception()  # marks the exception as retrieved
            if isinstance(error, asyncio.CancelledError):
                raise
        finally:
            opener.has_begun.set()

    async def close(self) -> None:
        """Close the model, or cancel its loading without an error."""
        self._closing.set()
        if not self.client.done():
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        else:
            await self._task
