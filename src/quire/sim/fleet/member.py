"""One server of a simulated fleet: the real scheduler over the real memory, and a clock that a profile moves.

It is told the time, never asks for it. A step is under way from `begin` to `end`; what came of it is told then.
"""

from collections.abc import Callable
from dataclasses import dataclass

from quire.core.digests import BlockHasher, Namespace
from quire.core.events import Finished, KVEvent, RequestEvent, Token
from quire.core.memory.kv_config import KVMemoryConfig
from quire.core.memory.kv_memory import KVMemory
from quire.core.request import Continuation, PriorityClass, Request, ResolvedSampling
from quire.core.scheduling.scheduler import Scheduler
from quire.core.scheduling.scheduler_config import SchedulerConfig
from quire.core.scheduling.sequence import SequenceStatus
from quire.core.scheduling.waiting_queue import QueueConfig
from quire.core.step import StepPlan
from quire.engine.step_profile import StepLoad, StepProfile
from quire.errors import InvariantError
from quire.sim.fleet.clock_runner import TOKEN, answer_of
from quire.workload.workload_request import WorkloadRequest

KEY = bytes(32)
MODEL = "model"


@dataclass(frozen=True, slots=True)
class MemberSize:
    """How large a member is, and how fast."""

    num_blocks: int
    block_size: int = 512
    max_step_tokens: int = 8192
    max_running: int = 256
    max_requests: int = 1 << 20
    speed: float = 1.0
    """Times as fast as the profile says."""
    head_starts_s: tuple[float, float, float] = (60.0, 20.0, 0.0)
    """Of the classes high, normal and low."""
    step_limit_s: float = 0.0
    """How long a step may take that reads prompts; 0: as long as its tokens take."""
    is_cache_shared: bool = False
    """Whether all tenants are one cache group; else each has its own."""

    def namespace(self, tenant: str) -> Namespace:
        """In which blocks of a tenant are named."""
        return Namespace(1, MODEL, "", "slots", self.block_size, "" if self.is_cache_shared else tenant)


class Member:
    """A scheduler, a memory, and how far both are."""

    def __init__(self, size: MemberSize, profile: StepProfile, emit: Callable[[KVEvent], None] | None = None) -> None:
        self.size = size
        self._profile = profile
        self.memory = KVMemory(KVMemoryConfig(size.num_blocks, size.block_size), BlockHasher(KEY), emit)
        queue = QueueConfig(size.max_requests, *size.head_starts_s)
        config = SchedulerConfig(size.max_step_tokens, size.max_running, queue=queue, step_limit_s=size.step_limit_s)
        self.scheduler = Scheduler(config, self.memory)
        self.under_way: StepPlan | None = None
        self._expected: dict[str, int] = {}
        """Tokens that are likely to be computed of what has not begun."""
        self.busy_s = 0.0
        self.num_prompt_tokens_computed = 0

    def submit(
        self, asked: WorkloadRequest, now_s: float, num_produced: int = 0, num_uncached: int | None = None
    ) -> None:
        """Queue it, or raise RequestError or CapacityError. With tokens from elsewhere it goes on behind them. Until it
        begins, only who sent it knows how much of it is likely to be computed."""
        request = Request(
            request_id=asked.name,
            prompt=asked.prompt,
            namespace=self.size.namespace(asked.tenant),
            arrival_s=now_s,
            params=ResolvedSampling(max_tokens=asked.max_tokens),
            tenant=asked.tenant,
            priority=PriorityClass(asked.priority),
            continuations=(Continuation(0, (TOKEN,) * num_produced),),
        )
        enter = self.scheduler.restore if num_produced else self.scheduler.submit
        enter(request)
        self._expected[asked.name] = len(asked.prompt) if num_uncached is None else num_uncached

    def num_produced(self, name: str) -> int:
        """Tokens that this request has: its gateway's ledger knows them."""
        (sequence,) = self.scheduler.live[name].sequences
        return len(sequence.tokens) - sequence.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        """Prompt tokens that are still to be computed, of all it was given."""
        waiting, expected = SequenceStatus.WAITING, self._expected
        return sum(
            min(expected[name], one.num_uncomputed) if one.status is waiting else max(0, one.num_uncomputed - 1)
            for name, live in self.scheduler.live.items()
            for one in live.sequences
        )

    def begin(self, now_s: float) -> float | None:
        """Plan a step; how long it takes, or None if there is nothing to do."""
        if self.under_way is not None:
            raise InvariantError("begin: a step is under way")
        plan = self.scheduler.plan(now_s)
        if not plan.items:
            return None
        self.under_way = plan
        load = StepLoad.of(plan)
        self.num_prompt_tokens_computed += load.num_prompt_tokens
        took_s = self._profile.duration_s(load, self.size.speed)
        self.busy_s += took_s
        return took_s

    def end(self, now_s: float) -> list[RequestEvent]:
        """The step is done. What happened, tokens aside: nearly all events are such, and nobody here looks at them."""
        plan, self.under_way = self.under_way, None
        if plan is None:
            raise InvariantError("end: no step is under way")
        told = [event for event in self.scheduler.apply(answer_of(plan), now_s) if type(event) is not Token]
        for event in told:
            if isinstance(event, Finished):
                del self._expected[event.request_id]
        return told
