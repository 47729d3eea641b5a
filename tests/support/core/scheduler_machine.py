"""The hypothesis state machine of the scheduler: anything in any order, every promise after every step."""

from typing import Any, ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from quire.core.inspect import invariants
from quire.core.request import PriorityClass
from quire.core.scheduling.waiting_queue import QueueConfig
from quire.core.step import StepPlan
from quire.errors import CapacityError, RequestTooLargeError
from quire.sim.server.guesses import Guesser
from tests.support.servers.server import VOCABULARY, Server

TOKEN = st.integers(0, 1)
PICK = st.integers(0, 1_000_000)
GUESSER = st.builds(Guesser, PICK, st.just(VOCABULARY), st.sampled_from((0.5, 0.95)), st.integers(1, 6))


class SchedulerMachine(RuleBasedStateMachine):
    """Small pools, few places, prompts that meet; what each client gets is compared with the request alone."""

    num_steps: ClassVar[int] = 0

    @initialize(
        num_blocks=st.integers(4, 64),
        block_bits=st.integers(0, 3),
        max_running=st.integers(1, 5),
        extra=st.integers(0, 20),
        guesser=st.none() | GUESSER,
        num_kept=st.integers(0, 12),
    )
    def start(
        self, num_blocks: int, block_bits: int, max_running: int, extra: int, guesser: Guesser | None, num_kept: int
    ) -> None:
        size = 1 << block_bits
        sizes = {"max_running": max_running, "max_step_tokens": max_running + size + extra}
        self.settings = sizes | self.configured(guesser, num_kept)
        self.shape = (num_blocks, size)
        self.server = self.new_server()
        self.plan: StepPlan | None = None
        self.is_under_way = False

    def configured(self, guesser: Guesser | None, num_kept: int) -> dict[str, Any]:
        return {"propose": guesser}

    def new_server(self) -> Server:
        queue = QueueConfig(max_requests=12, tenant_weights={"a": 1.0, "b": 2.0})
        return Server(*self.shape, queue=queue, **self.settings)

    @rule(
        prompt=st.lists(TOKEN, min_size=1, max_size=24),
        max_tokens=st.integers(0, 8),
        n=st.integers(1, 3),
        priority=st.sampled_from(PriorityClass),
        tenant=st.sampled_from("ab"),
        timeout_s=st.none() | st.floats(1.0, 12.0),
        penalty=st.sampled_from((0.0, 0.5)),
        prompt_logprobs=st.sampled_from((None, None, None, 0)),
    )
    def submit(self, prompt: list[int], max_tokens: int, n: int, penalty: float, **options: object) -> None:
        try:
            self.server.ask(prompt, max_tokens, n=n, frequency_penalty=penalty, **options)  # type: ignore[arg-type]
        except (CapacityError, RequestTooLargeError):
            self.server.check()

    @precondition(lambda self: self.plan is None)
    @rule()
    def begin_step(self) -> None:
        plan = self.server.plan()
        if plan.items:
            self.plan = plan
        else:
            assert not self.server.scheduler.live, "somebody waits and nothing runs"

    @precondition(lambda self: self.plan is not None)
    @rule(fail=st.integers(0, 15))
    def finish_step(self, fail: int) -> None:
        assert self.plan is not None
        failed = [item.sequence_id for at, item in enumerate(self.plan.items) if at == fail]
        plan, self.plan = self.plan, None
        self.server.finish(plan, failed)

    @precondition(lambda self: self.server.scheduler.live)
    @rule(pick=PICK)
    def cancel(self, pick: int) -> None:
        names = sorted(self.server.scheduler.live)
        self.server.cancel(names[pick % len(names)])

    @precondition(lambda self: self.server.scheduler.live)
    @rule(pick=PICK, index=st.integers(0, 2))
    def drop(self, pick: int, index: int) -> None:
        names = sorted(self.server.scheduler.live)
        self.server.drop(names[pick % len(names)], index)

    @rule()
    def preempt(self) -> None:
        self.server.scheduler.preempt_latest()

    @rule(num_blocks=st.integers(0, 9))
    def evict(self, num_blocks: int) -> None:
        self.server.memory.evict(num_blocks)

    @rule()
    def clear(self) -> None:
        self.server.memory.clear()

    @precondition(lambda self: self.server.ledger.entries)
    @rule(pick=PICK)
    def pin(self, pick: int) -> None:
        entries = list(self.server.ledger.entries.values())
        request = entries[pick % len(entries)].request
        self.server.memory.pin(request.namespace, request.prompt, self.server.now_s + pick % 7, request.tenant)

    @rule(seconds=st.floats(0.0, 5.0))
    def wait(self, seconds: float) -> None:
        self.server.now_s += seconds

    @rule()
    def crash(self) -> None:
        """The worker dies, perhaps in the middle of a step; another gets every open request with its tokens."""
        old, self.server, self.plan = self.server, self.new_server(), None
        self.server.now_s = old.now_s
        self.server.ledger = old.ledger
        self.server.next_name = old.next_name
        for request in old.ledger.unfinished():
            self.server.scheduler.restore(request)
        for name, index in old.ledger.open_cancellations():
            self.server.scheduler.cancel(name, index)

    @invariant()
    def every_promise_holds(self) -> None:
        SchedulerMachine.num_steps += self.is_under_way
        self.is_under_way = True
        self.server.check()
        assert not self.server.ledger.violations, self.server.ledger.violations

    def teardown(self) -> None:
        if not hasattr(self, "server"):
            return
        if self.plan is not None:
            self.server.finish(self.plan)
        self.server.run()
        assert not self.server.ledger.open
        self.server.memory.advance(self.server.now_s + 1e6)
        invariants.check_at_rest(self.server.memory)


class HybridSchedulerMachine(SchedulerMachine):
    """The same of a model with recurrent layers: few slots for states, or none, and nobody who guesses."""

    def configured(self, guesser: Guesser | None, num_kept: int) -> dict[str, Any]:
        return {"num_kept": num_kept}
