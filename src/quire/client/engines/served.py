"""A model in its own worker process, used like one in this process. If the worker dies, a new one resumes its requests.

async with ServedModel(plan_worker("model")) as model:
    async for piece in model.stream("Once upon a time"):
        print(piece.text, end="")
"""

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, fields, replace
from types import TracebackType

from quire.checkpoints import Checkpoint, Progress, quiet, resolve
from quire.checkpoints.grammar_vocabulary import grammar_tokens
from quire.client.engines.client import EngineClient, EngineStats
from quire.client.request.text_model import TextModel, read_tokenizer
from quire.config import ModelSettings, ServingSettings
from quire.config.machine import memory_budget_bytes
from quire.config.model_settings import MEMORY_SHARE
from quire.engine.loading import kv_key, queue_of
from quire.engine.trace_recorder import TraceSettings
from quire.errors import EngineDeadError
from quire.text.grammars.checker import GrammarChecker
from quire.text.sandboxed.messages import LoadVocabulary
from quire.text.tokenizer import Tokenizer
from quire.worker.kv_event_settings import KVEventSettings
from quire.worker.messages import Open, Ready, WorkerLoad
from quire.worker.parent.spawned_worker import SpawnedWorker
from quire.worker.parent.supervisor import Supervisor
from quire.worker.parent.worker_plan import Limits, WorkerPlan

WORKER_COUNTS = {one.name for one in fields(EngineStats)} & {*WorkerLoad.__struct_fields__}
"""Fields of `EngineStats` that are copied from the worker's last report."""
BUSY_S = 1.0
"""A model counts as busy if its step in flight has run for longer."""


@dataclass(frozen=True, slots=True)
class Serving:
    """The plan of the worker to spawn, and functions that build the text model in the parent process."""

    plan: WorkerPlan
    text_of: Callable[[Ready], TextModel]
    read_ahead: Callable[[], None] = lambda: None
    """Starts reading the tokenizer in a thread; called as soon as the worker has been spawned."""


PrepareModel = Callable[[], Serving]
"""Called in a thread, because a model may have to be downloaded or a file converted."""


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """Settings that differ between the models of one server."""

    number: int = 0
    """The model's index; it gives each model its own KV-event endpoint."""
    sampling: Mapping[str, float] = field(default_factory=dict)
    """Overrides the sampling defaults in the model's files."""
    runs_at_low_priority: bool = False
    """Whether the worker loads at low CPU priority, because other models may be serving."""
    trace: TraceSettings | None = None
    """Where the model's workers write traces; None: no traces."""


def plan_worker(
    name: str,
    settings: ModelSettings | None = None,
    serving: ServingSettings | None = None,
    *,
    limits: Limits | None = None,
    options: ModelOptions | None = None,
    progress: Progress = quiet,
) -> PrepareModel:
    """Return a function that prepares a worker for a directory, GGUF file or Hub id. Call it in a thread, because it
    reads files and may download. It raises CheckpointError or ConfigError."""
    model_settings, serving_settings = settings or ModelSettings(), serving or ServingSettings()
    model_options = options or ModelOptions()

    def prepare() -> Serving:
        checkpoint = resolve(name, progress=progress)
        # Fixed once, because a replacement worker must have capacity for the same requests.
        memory_bytes = model_settings.memory_bytes or memory_budget_bytes(MEMORY_SHARE)
        kv_events = _kv_events(serving_settings)
        open_message = Open(
            str(checkpoint.source),
            replace(model_settings, memory_bytes=memory_bytes),
            queue_of(serving_settings),
            kv_key(serving_settings),
            None if kv_events is None else kv_events.of_worker(model_options.number),
            model_options.runs_at_low_priority,
            model_options.trace,
        )
        loader = _TextLoader(checkpoint, model_settings, model_options.sampling)
        plan = WorkerPlan(open_message, limits or Limits(stuck_s=serving_settings.stuck_step_s), progress=progress)
        return Serving(plan, loader.load, loader.read_ahead)

    return prepare


class _TextLoader:
    """Builds the text model. The tokenizer is read while the worker loads the weights, which takes longer. Reading
    starts after the worker was spawned, because reading holds the GIL, which spawning needs."""

    def __init__(self, checkpoint: Checkpoint, settings: ModelSettings, sampling: Mapping[str, float]) -> None:
        self._checkpoint = checkpoint
        self._settings = settings
        self._sampling = sampling
        self._tokenizer_future: Future[Tokenizer] | None = None

    def read_ahead(self) -> None:
        """Start reading the tokenizer in a thread. Reloads of the model use the same result, because reading holds
        the GIL and interrupts all streams."""
        if self._tokenizer_future is not None:
            return
        executor = ThreadPoolExecutor(1, "tokenizer")
        self._tokenizer_future = executor.submit(read_tokenizer, self._checkpoint)
        executor.shutdown(wait=False)

    def load(self, ready: Ready) -> TextModel:
        checkpoint, vocabulary_size = self._checkpoint, ready.info.vocabulary_size
        future, self._tokenizer_future = self._tokenizer_future, None
        tokenizer = read_tokenizer(checkpoint) if future is None else future.result()
        self._tokenizer_future = future  # set only on success, so a failed read is repeated the next time
        grammars = GrammarChecker(lambda: LoadVocabulary(*_grammar_tokens(checkpoint, vocabulary_size)))
        return TextModel.of(
            checkpoint,
            ready.info,
            tokenizer,
            grammars,
            tool_format=self._settings.tool_format,
            sampling=self._sampling,
        )


def _grammar_tokens(checkpoint: Checkpoint, vocabulary_size: int) -> tuple[str, int, tuple[int, ...]]:
    tokenizer_json, end_tokens = grammar_tokens(checkpoint)
    return tokenizer_json, vocabulary_size, end_tokens


def _kv_events(serving: ServingSettings) -> KVEventSettings | None:
    if serving.kv_events is None:
        return None
    return KVEventSettings(
        serving.kv_events, serving.kv_events_replay or "", serving.kv_events_topic or "", serving.kv_events_encoding
    )


class ServedModel(EngineClient):
    """A model in a supervised worker process, used by any number of tasks on one event loop."""

    def __init__(
        self,
        prepare: PrepareModel,
        on_opening: Callable[[], None] = lambda: None,
        spawned_worker: SpawnedWorker | None = None,
    ) -> None:
        """`on_opening` is called after the worker received its open command, or if its start failed. `spawned_worker`
        is a worker process that was spawned before the model was prepared; None: spawn one."""
        super().__init__()
        self._prepare = prepare
        self._on_opening = on_opening
        self._spawned = spawned_worker
        self._supervisor: Supervisor | None = None

    async def __aenter__(self) -> "ServedModel":
        self._loop = asyncio.get_running_loop()
        serving = await asyncio.to_thread(self._prepare)
        # The worker is spawned in this thread, not in a pool, because it dies with the thread that spawned it.
        supervisor = self._supervisor = Supervisor(serving.plan, self._on_events, self._on_failure, self._spawned)
        starting = asyncio.ensure_future(supervisor.start())
        try:
            await supervisor.open_sent.wait()
            self._on_opening()
            serving.read_ahead()
            text = await asyncio.to_thread(serving.text_of, await starting)
        except BaseException:
            await supervisor.close()
            raise
        self._port, self._text = supervisor, text
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self._text is not None:
                self._text.close()
            if self._supervisor is not None:
                await asyncio.shield(self._supervisor.close())
        finally:
            self._end_all(EngineDeadError("the model was closed while requests were running"))

    async def suspend(self) -> None:
        """Stop the worker. Open requests wait in the parent's ledger (its record of requests)."""
        await self.supervisor.suspend()

    async def resume(self) -> None:
        """Spawn a new worker, which resumes the waiting requests."""
        await self.supervisor.resume()

    @property
    def supervisor(self) -> Supervisor:
        self._port_and_text()
        if self._supervisor is None:
            raise EngineDeadError("the model has no worker; enter it first: async with ServedModel(...)")
        return self._supervisor

    @property
    def is_ready(self) -> bool:
        return self._port is not None and self._supervisor is not None and self._supervisor.is_ready

    @property
    def is_busy(self) -> bool:
        """Whether the step in flight has run for more than a second."""
        return self._supervisor is not None and self._supervisor.step_s > BUSY_S

    def stats(self) -> EngineStats:
        """Return the counters that the worker reported with its last step."""
        info, supervisor = self.text.info, self.supervisor
        load, sizes = supervisor.load, supervisor.step_sizes
        shared = {name: getattr(load, name) for name in WORKER_COUNTS}
        return EngineStats(
            num_blocks=info.num_blocks,
            block_size=info.block_size,
            kv_usage=load.num_used_blocks / info.num_blocks,
            num_restarts=supervisor.num_restarts,
            step_sizes=tuple(sizes.cumulative()),
            num_step_tokens=sizes.num_tokens,
            step_s=round(supervisor.step_s, 3),
            **shared,
        )
