"""A scheduler on an oracle, small enough to know by heart, and a ledger that knows what each request is owed."""

from collections.abc import Sequence
from dataclasses import replace

from quire.backends.oracle import OracleRunner
from quire.backends.protocol import Capacity
from quire.core.digests import BlockHasher, Namespace
from quire.core.events import RequestEvent
from quire.core.inspect import invariants
from quire.core.memory.kv_config import KVMemoryConfig
from quire.core.memory.kv_memory import KVMemory
from quire.core.request import Continuation, PriorityClass, Request, ResolvedSampling
from quire.core.scheduling.drafts import Propose
from quire.core.scheduling.scheduler import MustWait, Scheduler, never_waits
from quire.core.scheduling.scheduler_config import SchedulerConfig
from quire.core.step import ROW_FAILED, RowError, RowResult, StepPlan, StepResult
from quire.sim.server.deliveries import Deliveries

VOCABULARY = 50
PIN_SHARE = 0.25


class Server:
    """One step takes one second. Every event is checked against what the request would get alone."""

    def __init__(
        self,
        num_blocks: int = 64,
        block_size: int = 4,
        *,
        num_kept: int | None = None,
        propose: Propose | None = None,
        **settings: object,
    ) -> None:
        """With `num_kept` the model has recurrent layers, and so many slots beside those of who runs."""
        config = SchedulerConfig(**{"max_step_tokens": 64, "max_running": 8, **settings})  # type: ignore[arg-type]
        self.namespace = Namespace(1, "oracle", "", "slots", block_size, "group")
        num_running = 0 if num_kept is None else config.max_running + 1
        num_slots = num_running + (num_kept or 0)
        memory = KVMemoryConfig(num_blocks, block_size, PIN_SHARE, num_slots=num_slots, num_running_slots=num_running)
        self.memory = KVMemory(memory, BlockHasher(bytes(32)))
        self.scheduler = Scheduler(config, self.memory, propose)
        self.runner = OracleRunner(
            Capacity(num_blocks, block_size, 1 << 30, config.max_step_tokens, VOCABULARY, 8 * block_size, num_slots)
        )
        self.ledger = Deliveries(VOCABULARY, has_recurrent_state=num_slots > 0)
        self.now_s = 0.0
        self.log: list[RequestEvent] = []
        self.plans: list[StepPlan] = []
        self.holds: MustWait = never_waits
        self.next_name = 0

    def ask(
        self,
        prompt: Sequence[int],
        max_tokens: int = 4,
        *,
        n: int = 1,
        priority: PriorityClass = PriorityClass.NORMAL,
        tenant: str = "default",
        timeout_s: float | None = None,
        produced: Sequence[Sequence[int]] | None = None,
        is_explained: bool = False,
        reports_progress: bool = False,
        **params: object,
    ) -> str:
        """Submit a request; returns its id."""
        self.next_name += 1
        name = f"r{self.next_name}"
        answers = produced or [()] * n
        request = Request(
            request_id=name,
            prompt=tuple(prompt),
            namespace=replace(self.namespace, cache_group=tenant),
            arrival_s=self.now_s,
            params=ResolvedSampling(max_tokens=max_tokens, **params),  # type: ignore[arg-type]
            seed=self.next_name,
            tenant=tenant,
            priority=priority,
            continuations=tuple(Continuation(index, tuple(answer)) for index, answer in enumerate(answers)),
            deadline_s=None if timeout_s is None else self.now_s + timeout_s,
            is_explained=is_explained,
            reports_progress=reports_progress,
        )
        if produced is None:
            self.scheduler.submit(request)
        else:
            self.scheduler.restore(request)
        self.ledger.add(request)
        for index, answer in enumerate(answers):
            self.ledger.entries[name].tokens[index] = list(answer)
        return name

    def cancel(self, name: str) -> None:
        self.scheduler.cancel(name)
        self.ledger.record_cancellation(name)

    def drop(self, name: str, index: int) -> None:
        """Cancel one continuation alone."""
        self.scheduler.cancel(name, index)
        self.ledger.record_continuation_cancellation(name, index)

    def plan(self) -> StepPlan:
        self.ledger.planned_s = self.now_s
        plan = self.scheduler.plan(self.now_s, self.holds)
        if plan.items:
            self.plans.append(plan)
        else:
            self.take(self.scheduler.take_events())
        return plan

    def finish(self, plan: StepPlan, failed: Sequence[int] = ()) -> None:
        """The step returns; rows of these sequence ids fail."""
        result = self.runner.start(plan).wait()
        for sequence in self.scheduler.running:
            if sequence.sequence_id in failed:
                self.ledger.record_row_failure(sequence.request.request_id)
        rows = {
            key: RowResult(error=RowError(ROW_FAILED, "broken")) if key in failed else row
            for key, row in result.rows.items()
        }
        self.now_s += 1.0
        self.take(self.scheduler.apply(StepResult(plan.step, rows), self.now_s))
        self.check()

    def step(self) -> StepPlan:
        plan = self.plan()
        if plan.items:
            self.finish(plan)
        return plan

    def run(self, max_steps: int = 10_000) -> None:
        """Until everybody has an answer."""
        for _ in range(max_steps):
            if not self.scheduler.live:
                self.take(self.scheduler.take_events())
                invariants.check_at_rest(self.memory)
                return
            assert self.step().items or not self.scheduler.live, "nothing runs though somebody waits"
        raise AssertionError("it does not end")

    def take(self, events: list[RequestEvent]) -> None:
        self.log += events
        for event in events:
            self.ledger.take(event)
        assert not self.ledger.violations, self.ledger.violations

    def check(self) -> None:
        invariants.check(self.memory)
        if self.scheduler.in_flight is None:
            invariants.check_scheduler(self.scheduler)

    def events(self, kind: type) -> list[RequestEvent]:
        return [event for event in self.log if isinstance(event, kind)]

    @property
    def running(self) -> list[str]:
        return [sequence.request.request_id for sequence in self.scheduler.running]

    @property
    def num_computed(self) -> int:
        return self.scheduler.stats.num_computed_tokens
