"""A model in a worker of its own, used like one in this process. Its requests go on when the worker dies.

async with ServedModel(plan_worker("model")) as model:
    async for piece in model.stream("Once upon a time"):
        print(piece.text, end="")
"""

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from types import TracebackType

from quire.checkpoints import Checkpoint, Progress, quiet, resolve
from quire.checkpoints.grammar_vocabulary import grammar_tokens
from quire.client.engines.client import EngineClient, EngineStats
from quire.client.request.text_model import TextModel, read_tokenizer
from quire.config import ModelSettings, ServingSettings
from quire.config.machine import share_of_memory_bytes
from quire.config.model_settings import MEMORY_SHARE
from quire.engine.loading import kv_key, queue_of
from quire.engine.trace_recorder import TraceSettings
from quire.errors import EngineDeadError
from quire.text.grammars.checker import GrammarChecker
from quire.text.sandboxed.grammar_messages import LoadVocabulary
from quire.text.tokenizer import Tokenizer
from quire.worker.kv_event_settings import KVEventSettings
from quire.worker.messages import Open, Ready, WorkerLoad
from quire.worker.parent.spawned_worker import SpawnedWorker
from quire.worker.parent.step_sizes import StepSizes
from quire.worker.parent.supervisor import Supervisor
from quire.worker.parent.worker_plan import Limits, WorkerPlan

BUSY_S = 1.0
"""A model whose step in flight has run for longer is busy."""


@dataclass(frozen=True, slots=True)
class Serving:
    """A worker to spawn, and how its parent gets the model's text side once it is ready."""

    plan: WorkerPlan
    text_of: Callable[[Ready], TextModel]
    read_ahead: Callable[[], None] = lambda: None
    """Begins to read the tokenizer: called once the worker has been spawned."""


PrepareModel = Callable[[], Serving]
"""Called beside the event loop: a name may have to be downloaded, a file converted."""


@dataclass(frozen=True, slots=True)
class OwnSettings:
    """Settings of one model among several of a server."""

    number: int = 0
    """Keeps their KV events apart."""
    sampling: Mapping[str, float] = field(default_factory=dict)
    """Comes before the sampling settings in the model's files."""
    runs_at_low_priority: bool = False
    """Others may run while it loads."""
    trace: TraceSettings | None = None
    """Where its workers write their traces."""


def plan_worker(
    name: str,
    settings: ModelSettings | None = None,
    serving: ServingSettings | None = None,
    *,
    limits: Limits | None = None,
    own: OwnSettings | None = None,
    progress: Progress = quiet,
) -> PrepareModel:
    """How to serve a directory, GGUF file or hub id. What is returned raises CheckpointError or ConfigError, and reads
    disks and perhaps a network: not for an event loop.
    """
    of_model, queueing, among = settings or ModelSettings(), serving or ServingSettings(), own or OwnSettings()

    def prepare() -> Serving:
        checkpoint = resolve(name, progress=progress)
        # Decided once: a worker that comes after another must find room for the same requests.
        memory_bytes = of_model.memory_bytes or share_of_memory_bytes(MEMORY_SHARE)
        announced = _kv_events(queueing)
        command = Open(
            str(checkpoint.source),
            replace(of_model, memory_bytes=memory_bytes),
            queue_of(queueing),
            kv_key(queueing),
            None if announced is None else announced.of_worker(among.number),
            among.runs_at_low_priority,
            among.trace,
        )
        loader = _TextLoader(checkpoint, of_model, among.sampling)
        plan = WorkerPlan(command, limits or Limits(stuck_s=queueing.stuck_step_s), progress=progress)
        return Serving(plan, loader.of, loader.read_ahead)

    return prepare


class _TextLoader:
    """Loads a model's text side: its tokenizer is read while the worker loads, which takes longer. Not before the
    worker is spawned: reading holds what a spawn needs too."""

    def __init__(self, checkpoint: Checkpoint, settings: ModelSettings, sampling: Mapping[str, float]) -> None:
        self._checkpoint = checkpoint
        self._settings = settings
        self._sampling = sampling
        self._reading: Future[Tokenizer] | None = None

    def read_ahead(self) -> None:
        """Begin. What was read once is kept for a model that comes back: reading holds the interpreter's lock, and
        stops every stream."""
        if self._reading is not None:
            return
        with_one_thread = ThreadPoolExecutor(1, "tokenizer")
        self._reading = with_one_thread.submit(read_tokenizer, self._checkpoint)
        with_one_thread.shutdown(wait=False)

    def of(self, ready: Ready) -> TextModel:
        checkpoint, size = self._checkpoint, ready.info.vocabulary_size
        reading, self._reading = self._reading, None
        tokenizer = read_tokenizer(checkpoint) if reading is None else reading.result()
        self._reading = reading  # what failed is read anew the next time
        grammars = GrammarChecker(lambda: LoadVocabulary(*_grammar_tokens(checkpoint, size)))
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
    """A model in a process that may die, for any number of tasks on one event loop."""

    def __init__(
        self,
        prepare: PrepareModel,
        on_opening: Callable[[], None] = lambda: None,
        first: SpawnedWorker | None = None,
    ) -> None:
        """`on_opening` is called once a worker has its open command, or there will be none; `first`: a worker that was
        spawned before anything was prepared."""
        super().__init__()
        self._prepare = prepare
        self._on_opening = on_opening
        self._first = first
        self._supervisor: Supervisor | None = None

    async def __aenter__(self) -> "ServedModel":
        self._loop = asyncio.get_running_loop()
        serving = await asyncio.to_thread(self._prepare)
        # Spawned here and not in a thread of a pool: a worker dies with the thread that spawned it.
        supervisor = self._supervisor = Supervisor(serving.plan, self._on_events, self._on_failure, self._first)
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

    async def set_aside(self) -> None:
        """End the worker. Its requests wait in the ledger."""
        await self.supervisor.set_aside()

    async def go_on(self) -> None:
        """Spawn a worker again; it continues what waits."""
        await self.supervisor.go_on()

    @property
    def supervisor(self) -> Supervisor:
        self._started()
        if self._supervisor is None:
            raise EngineDeadError("the model has no worker; enter it first")
        return self._supervisor

    @property
    def is_ready(self) -> bool:
        return self._port is not None and self._supervisor is not None and self._supervisor.is_ready

    @property
    def is_busy(self) -> bool:
        """The step in flight is longer than a second."""
        return self._supervisor is not None and self._supervisor.step_s > BUSY_S

    @property
    def state(self) -> str:
        """`loading`, `ready`, `restarting`, `draining`, `closed` or `failed`."""
        return "loading" if self._supervisor is None else self._supervisor.state.value

    @property
    def num_restarts(self) -> int:
        return 0 if self._supervisor is None else self._supervisor.num_restarts

    @property
    def load(self) -> WorkerLoad:
        return WorkerLoad() if self._supervisor is None else self._supervisor.load

    @property
    def step_sizes(self) -> StepSizes:
        """What steps computed, of all workers so far."""
        return StepSizes() if self._supervisor is None else self._supervisor.step_sizes

    def stats(self) -> EngineStats:
        """What the worker reported with its last step."""
        info, load, sizes = self.text.info, self.load, self.step_sizes
        return EngineStats(
            num_blocks=info.num_blocks,
            block_size=info.block_size,
            kv_usage=load.num_used_blocks / info.num_blocks,
            num_preemptions=load.num_preemptions,
            num_steps=load.num_steps,
            num_computed_tokens=load.num_computed_tokens,
            num_restarts=self.num_restarts,
            step_sizes=tuple(sizes.cumulative()),
            num_step_tokens=sizes.num_tokens,
            num_draft_tokens=load.num_draft_tokens,
            num_accepted_tokens=load.num_accepted_tokens,
            num_forced_tokens=load.num_forced_tokens,
            grammar_compile_s=load.grammar_compile_s,
            grammar_mask_s=load.grammar_mask_s,
            num_snapshots=load.num_snapshots,
            step_s=round(0.0 if self._supervisor is None else self._supervisor.step_s, 3),
            work=load.work,
        )

    async def drain(self, timeout_s: float) -> bool:
        """Take nothing new and wait until what runs has ended; false if it has not in time."""
        return await self.supervisor.drain(timeout_s)
