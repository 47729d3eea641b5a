"""One member of a simulated fleet: the real scheduler and the real KV memory, with step durations from a profile.

Callers pass the time. A step runs from `begin_step` to `end_step`, which returns its events.
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
from quire.core.step import RowResult, StepPlan, StepResult
from quire.engine.step_profile import StepLoad, StepProfile
from quire.errors import InvariantError
from quire.workload.workload_request import WorkloadRequest

TOKEN = 0
"""The only output token. No prompt of a trace contains it, so output never matches a prompt in the cache."""
_SAMPLED_ROW = RowResult((TOKEN,))
_UNSAMPLED_ROW = RowResult()
KEY = bytes(32)
MODEL = "model"


@dataclass(frozen=True, slots=True)
class MemberSize:
    """Size and speed of a member."""

    num_blocks: int
    block_size: int = 512
    max_step_tokens: int = 8192
    max_running: int = 256
    max_requests: int = 1 << 20
    speed: float = 1.0
    """Speed relative to the profile."""
    head_starts_s: tuple[float, float, float] = (60.0, 20.0, 0.0)
    """Head starts of the classes high, normal and low: they are queued as if they had arrived earlier by this time."""
    step_limit_s: float = 0.0
    """Maximum duration of a step with prefill; 0: no limit."""
    is_cache_shared: bool = False
    """Whether all tenants share one cache group; otherwise each tenant has its own."""

    def namespace(self, tenant: str) -> Namespace:
        """Return the namespace of a tenant's blocks."""
        return Namespace(1, MODEL, "", "slots", self.block_size, "" if self.is_cache_shared else tenant)


class Member:
    """A scheduler, its memory, and the step in progress."""

    def __init__(self, size: MemberSize, profile: StepProfile, emit: Callable[[KVEvent], None] | None = None) -> None:
        self.size = size
        self._profile = profile
        self.memory = KVMemory(KVMemoryConfig(size.num_blocks, size.block_size), BlockHasher(KEY), emit)
        queue = QueueConfig(size.max_requests, *size.head_starts_s)
        config = SchedulerConfig(size.max_step_tokens, size.max_running, queue=queue, step_limit_s=size.step_limit_s)
        self.scheduler = Scheduler(config, self.memory)
        self.step_in_progress: StepPlan | None = None
        self._estimates: dict[str, int] = {}
        """Number of prompt tokens that a request is expected to compute, by request; used until the request starts."""
        self.busy_s = 0.0
        self.num_prompt_tokens_computed = 0

    def submit(
        self, workload_request: WorkloadRequest, now_s: float, num_produced: int = 0, num_uncached: int | None = None
    ) -> None:
        """Queue a request. Raises RequestError or CapacityError if it is refused. A request with `num_produced` output
        tokens continues after them. Until it starts, the gateway's estimate `num_uncached` counts as its load."""
        request = Request(
            request_id=workload_request.name,
            prompt=workload_request.prompt,
            namespace=self.size.namespace(workload_request.tenant),
            arrival_s=now_s,
            params=ResolvedSampling(max_tokens=workload_request.max_tokens),
            tenant=workload_request.tenant,
            priority=PriorityClass(workload_request.priority),
            continuations=(Continuation(0, (TOKEN,) * num_produced),),
        )
        add = self.scheduler.restore if num_produced else self.scheduler.submit
        add(request)
        self._estimates[workload_request.name] = len(workload_request.prompt) if num_uncached is None else num_uncached

    def num_produced(self, name: str) -> int:
        """Return the number of output tokens that this request has so far."""
        (sequence,) = self.scheduler.live[name].sequences
        return len(sequence.tokens) - sequence.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        waiting, expected = SequenceStatus.WAITING, self._estimates
        return sum(
            min(expected[name], one.num_uncomputed) if one.status is waiting else max(0, one.num_uncomputed - 1)
            for name, live in self.scheduler.live.items()
            for one in live.sequences
        )

    def begin_step(self, now_s: float) -> float | None:
        """Plan and start a step. Returns its duration, or None if there is nothing to compute."""
        if self.step_in_progress is not None:
            raise InvariantError("begin_step: a step is in progress")
        plan = self.scheduler.plan(now_s)
        if not plan.items:
            return None
        self.step_in_progress = plan
        load = StepLoad.of(plan)
        self.num_prompt_tokens_computed += load.num_prompt_tokens
        duration_s = self._profile.duration_s(load, self.size.speed)
        self.busy_s += duration_s
        return duration_s

    def end_step(self, now_s: float) -> list[RequestEvent]:
        """End the step. Returns its events except output tokens, which are numerous and not needed here."""
        plan, self.step_in_progress = self.step_in_progress, None
        if plan is None:
            raise InvariantError("end_step: no step is in progress")
        events = [event for event in self.scheduler.apply(result_of(plan), now_s) if type(event) is not Token]
        for event in events:
            if isinstance(event, Finished):
                del self._estimates[event.request_id]
        return events


def result_of(plan: StepPlan) -> StepResult:
    """Return the result of a step, with a fixed token for each row that samples."""
    return StepResult(
        plan.step, {item.sequence_id: _UNSAMPLED_ROW if item.sampling is None else _SAMPLED_ROW for item in plan.items}
    )
