"""The engine, which connects a scheduler, its memory and a runner. Token ids in, events with token ids out.

    request ─► scheduler ─► plan ─► runner ─► result ─► scheduler ─► events

Text, streams, threads and processes are in other modules. Callers pass the clock.
"""

from collections.abc import Callable
from dataclasses import dataclass

from quire.backends.protocol import Runner
from quire.core.digests import BlockHasher, Namespace
from quire.core.divergence import Divergence
from quire.core.events import KVEvent, Queued, Refused, RequestEvent
from quire.core.memory.kv_config import KVMemoryConfig
from quire.core.memory.kv_memory import KVMemory
from quire.core.request import Request
from quire.core.scheduling.ngrams import make_scheduler
from quire.core.scheduling.scheduler import never_waits
from quire.core.scheduling.scheduler_config import SchedulerConfig
from quire.core.step import ROW_FAILED, RowError, RowResult, StepPlan, StepResult
from quire.engine.engine_watch import EngineWatch, ShowSnapshot
from quire.engine.guides import GrammarMatchers
from quire.engine.trace_recorder import NoTrace, TraceRecorder, TraceSettings, open_recorder
from quire.engine.trace_records import TraceHeader
from quire.errors import CapacityError, InvalidParameterError, InvariantError, RequestError

FORMAT_VERSION = 1  # of KV blocks; part of their digests
GRAMMAR_WAIT_S = 0.05
"""Longest wait of an empty step for grammar work, before the loop checks for commands again."""

Clock = Callable[[], float]
"""A monotonic clock, in seconds."""
OnStepStart = Callable[[list[str]], None]
"""Called with the ids of a step's requests before it runs."""


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """The model-specific fields of a block namespace."""

    fingerprint: str
    kv_layout: str

    def namespace(self, block_size: int, cache_group: str, adapter: str = "") -> Namespace:
        """Return the namespace of a cache group's blocks on this model."""
        return Namespace(FORMAT_VERSION, self.fingerprint, adapter, self.kv_layout, block_size, cache_group)


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Properties of a loaded model, as clients of its engine see them."""

    identity: ModelIdentity
    block_size: int
    num_blocks: int
    vocabulary_size: int
    max_sequence_tokens: int
    line: str = ""
    """A summary of the memory sizes."""
    notes: tuple[str, ...] = ()
    """Notes for the operator that loaded the model."""
    exactness: str = ""
    """Engines with equal values compute bit-identical results; empty: unknown."""

    def namespace(self, cache_group: str, adapter: str = "") -> Namespace:
        """Return the namespace of a cache group's blocks on this model."""
        return self.identity.namespace(self.block_size, cache_group, adapter)


class Engine:
    """Serves one model's requests. Not thread-safe: only the thread that steps it may use it."""

    def __init__(
        self,
        runner: Runner,
        config: SchedulerConfig,
        identity: ModelIdentity,
        key: bytes,
        emit: Callable[[KVEvent], None] | None = None,
        guides: GrammarMatchers | None = None,
    ) -> None:
        capacity = runner.capacity
        self.runner = runner
        self.guides = guides
        """Applies grammars; None if the model has no tokenizer."""
        num_running = config.max_running + 1 if capacity.num_slots else 0  # one spare to examine the next request
        memory_config = KVMemoryConfig(
            capacity.num_blocks,
            capacity.block_size,
            config.pin_share,
            num_slots=capacity.num_slots,
            num_running_slots=num_running,
        )
        self.memory = KVMemory(memory_config, BlockHasher(key), emit)
        # Draft tokens are proposed only if the cost of checking them is known.
        self.scheduler = make_scheduler(config, self.memory, has_drafts=config.step_cost is not None)
        self.recorder: TraceRecorder = NoTrace()
        """Records the commands and steps of this engine."""
        self.info = ModelInfo(
            identity,
            capacity.block_size,
            capacity.num_blocks,
            capacity.vocabulary_size,
            config.max_sequence_tokens,
        )
        self.watch: EngineWatch | None = None
        """Makes snapshots; None while the engine is not watched."""
        self._num_snapshots = 0
        self._compiling: dict[str, tuple[Request, bool]] = {}
        """Requests whose grammars are being compiled, each with its `is_restored`."""
        self._late_events: list[RequestEvent] = []  # of requests that entered when their grammars were compiled

    @property
    def num_snapshots(self) -> int:
        return self._num_snapshots + (0 if self.watch is None else self.watch.num_snapshots)

    def record(self, settings: TraceSettings, started_unix_s: float) -> None:
        """Record commands and steps from now on. Raises ConfigError for a file that is missing or not private."""
        header = TraceHeader(
            quire=settings.quire,
            model=f"{self.info.identity.fingerprint} {self.info.identity.kv_layout}",
            started_unix_s=started_unix_s,
            vocabulary_size=self.info.vocabulary_size,
            has_real_token_ids=settings.has_real_token_ids,
            has_grammars=self.guides is not None,
            has_ngram_drafts=self.scheduler.propose is not None,
            memory=self.memory.config,
            scheduler=self.scheduler.config,
        )
        self.recorder = open_recorder(settings, header)

    @property
    def has_work(self) -> bool:
        return bool(self.scheduler.live or self._compiling or self._late_events) or self.scheduler.has_events

    def submit(self, request: Request) -> Queued | Refused:
        """Queue a request, or refuse it and change nothing. Blocks while its grammar is compiled; a loop with other
        requests calls `enter`."""
        return self._enter_compiled(request, is_restored=False)

    def check(self, request: Request) -> None:
        """Raise RequestError if this request could not finish even on an idle engine."""
        self.scheduler.check(request)

    def restore(self, request: Request) -> Queued | Refused:
        """Queue a request that an earlier engine had admitted, with the tokens produced so far."""
        return self._enter_compiled(request, is_restored=True)

    def enter(self, request: Request, *, is_restored: bool) -> list[RequestEvent]:
        """Queue a request without blocking. Returns no event while its grammar is compiled; a later step returns it."""
        try:
            if request.grammar is not None and not self._require_guides().is_compiled(request):
                self._compiling[request.request_id] = request, is_restored
                return []
        except RequestError as error:
            return [Refused.of(request.request_id, error, request.epoch)]
        return [self._enter_compiled(request, is_restored=is_restored)]

    def _enter_compiled(self, request: Request, *, is_restored: bool) -> Queued | Refused:
        try:
            if request.grammar is not None:
                self._require_guides().compile(request)
        except RequestError as error:
            return Refused.of(request.request_id, error, request.epoch)
        return self._queue(request, is_restored=is_restored)

    def _queue(self, request: Request, *, is_restored: bool) -> Queued | Refused:
        self.recorder.record_request(request, is_restored=is_restored)
        try:
            (self.scheduler.restore if is_restored else self.scheduler.submit)(request)
        except (RequestError, CapacityError) as error:
            refused = Refused.of(request.request_id, error, request.epoch)
            self.recorder.record_refusal(refused)
            return refused
        return Queued(request.request_id, epoch=request.epoch)

    def cancel(self, request_id: str, index: int | None = None) -> None:
        """End a request, or a single continuation of it; a later step returns its last events. Unknown ids are
        ignored."""
        if (entry := self._compiling.pop(request_id, None)) is not None:  # queue it now, to cancel it like the others
            self._late_events.append(self._queue(entry[0], is_restored=entry[1]))
        self.recorder.record_cancellation(request_id, index)
        self.scheduler.cancel(request_id, index)

    def clear(self) -> None:
        """Drop every cached block that is not in use."""
        self.recorder.record_clear()
        self.memory.clear()

    def explain(self, namespace: Namespace, prompt: tuple[int, ...], now_s: float) -> Divergence:
        """Return how much of this prompt is cached, and why its next token is not. Called between steps; only sets the
        memory's time."""
        self.recorder.record_explain(now_s)
        self.memory.advance(now_s)
        return self.scheduler.explain(namespace, prompt)

    def step(self, clock: Clock, on_start: OnStepStart = lambda _ids: None) -> list[RequestEvent]:
        """Plan, run and apply one step; return its events. The clock is read before and after the step."""
        if self.guides is not None:
            self._collect(self.guides)
        late_events, self._late_events = self._late_events, []
        plan = self._plan(clock())
        on_start(self._request_ids_in(plan))
        if not plan.items:
            if self.guides is not None and (plan.waiting_ids or self._compiling):
                self.guides.wait(GRAMMAR_WAIT_S)
            return late_events + self._record_events(self.scheduler.take_events())
        if self.watch is not None:
            self.watch.start_step(plan, clock)
        try:
            result = self._run(plan)
        except BaseException as error:
            # The step was aborted: its blocks cannot be trusted, and no sequence may wait for them.
            aborted = RowResult(error=RowError(ROW_FAILED, f"the step was aborted: {error!r}"))
            rows = dict.fromkeys((item.sequence_id for item in plan.items), aborted)
            self._apply(StepResult(plan.step, rows), clock())
            self._preempt_recurrent()
            raise
        self._check_tokens(result)
        events = late_events + self._record_events(self._apply(result, clock()))
        if self.watch is not None:
            self.watch.end_step(clock())
        return events

    def _collect(self, guides: GrammarMatchers) -> None:
        """Collect finished grammar work; requests whose grammars are now compiled enter the scheduler."""
        guides.collect()
        waiting, self._compiling = self._compiling, {}
        for request, is_restored in waiting.values():
            self._late_events += self.enter(request, is_restored=is_restored)

    def _plan(self, now_s: float) -> StepPlan:
        if self.guides is not None:
            self.guides.begin(now_s)
        plan = self.scheduler.plan(now_s, never_waits if self.guides is None else self.guides.must_wait)
        if plan.items or self.has_work:  # an idle loop has nothing to record
            self.recorder.record_plan(plan, now_s)
        return plan

    def _apply(self, result: StepResult, now_s: float) -> list[RequestEvent]:
        self.recorder.record_result(result, now_s)
        return self.scheduler.apply(result, now_s)

    def _preempt_recurrent(self) -> None:
        """Preempt all sequences with recurrent state, because an aborted step may have copied only some states."""
        self.recorder.record_abort()
        while self.memory.states is not None and self.scheduler.running:
            self.scheduler.preempt_latest()

    def _record_events(self, events: list[RequestEvent]) -> list[RequestEvent]:
        if self.guides is not None:
            self.guides.forget(events)
        self.recorder.record_events(events)
        return events

    def _run(self, plan: StepPlan) -> StepResult:
        """Run the plan; masks are computed while the device works."""
        pending, planned = self.runner.start(plan), self.scheduler.planned
        if self.guides is None:
            return pending.wait()
        result = pending.wait(self.guides.masks(plan, planned))
        return self.guides.apply(plan, planned, result)

    def _require_guides(self) -> GrammarMatchers:
        if self.guides is None:
            raise InvalidParameterError("expected no grammar: this model has no tokenizer for it", "grammar")
        return self.guides

    def _check_tokens(self, result: StepResult) -> None:
        """Raise InvariantError if the runner returned a token outside the vocabulary, before it reaches a client."""
        size = self.runner.capacity.vocabulary_size
        for row in result.rows.values():
            for token_id in (*row.token_ids, *row.forced):
                if not 0 <= token_id < size:
                    raise InvariantError(f"expected sampled tokens below {size}, got {token_id}")

    def _request_ids_in(self, plan: StepPlan) -> list[str]:
        sequence_ids = {item.sequence_id for item in plan.items}
        ids = {row.request.request_id for row in self.scheduler.running if row.sequence_id in sequence_ids}
        return sorted(ids if self.guides is None else ids.union(self.guides.request_ids))

    def begin_watch(self, period_s: float, show: ShowSnapshot) -> None:
        """Pass a snapshot to `show` every `period_s` seconds from now on."""
        self.end_watch()
        self.watch = EngineWatch(self.scheduler, self.memory, period_s, show)

    def end_watch(self) -> None:
        """Stop the snapshots."""
        self._num_snapshots, self.watch = self.num_snapshots, None

    def close(self) -> None:
        """Close the trace and the grammar thread, and release the runner's memory."""
        self.recorder.close()
        if self.guides is not None:
            self.guides.close()
        self.runner.close()
