"""Submit, cancel, step: a scheduler, its memory and a runner, on one screen. Token ids in, events with token ids out.

    request ─► scheduler ─► plan ─► runner ─► result ─► scheduler ─► events

Text, streams, threads and processes are other rooms. The clock is handed in.
"""

from collections.abc import Callable
from dataclasses import dataclass

from quire.backends.protocol import Runner
from quire.core.digests import BlockHasher, Namespace
from quire.core.events import RequestEvent
from quire.core.kv_memory import KVMemory
from quire.core.kv_shapes import KVMemoryConfig
from quire.core.policy import check_request
from quire.core.request import Request
from quire.core.scheduler import Scheduler
from quire.core.scheduler_shapes import SchedulerConfig
from quire.core.step import RowResult, StepResult

FORMAT_VERSION = 1

Clock = Callable[[], float]
"""Seconds that never go back."""


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """What names a model's blocks beside their tokens."""

    fingerprint: str
    kv_layout: str

    def namespace(self, block_size: int, cache_group: str, adapter: str = "") -> Namespace:
        """The namespace of a tenant's blocks on this model."""
        return Namespace(FORMAT_VERSION, self.fingerprint, adapter, self.kv_layout, block_size, cache_group)


class Engine:
    """One model's requests. Not safe for threads: whoever owns it steps it."""

    def __init__(self, runner: Runner, config: SchedulerConfig, identity: ModelIdentity, key: bytes) -> None:
        capacity = runner.capacity
        self.runner = runner
        self.memory = KVMemory(KVMemoryConfig(capacity.num_blocks, capacity.block_size), BlockHasher(key))
        self.scheduler = Scheduler(config, self.memory)
        self.identity = identity

    @property
    def has_work(self) -> bool:
        """Whether a request is alive. What became of one that just ended is still told by the next step."""
        return bool(self.scheduler.live)

    def namespace(self, cache_group: str, adapter: str = "") -> Namespace:
        """The namespace of a tenant's blocks on this model."""
        return self.identity.namespace(self.memory.config.block_size, cache_group, adapter)

    def submit(self, request: Request) -> None:
        """Queue a request, or raise RequestError or CapacityError and change nothing."""
        self.scheduler.submit(request)

    def check(self, request: Request) -> None:
        """Raise RequestError if this request could never be served, however empty the engine."""
        check_request(request, self.scheduler.config, self.memory.config)

    def cancel(self, request_id: str) -> None:
        """End a request; its last events come with a later step. Unknown ids are none of our business."""
        self.scheduler.cancel(request_id)

    def step(self, clock: Clock) -> list[RequestEvent]:
        """Plan, run, apply; what happened to whom. The clock is read before and after the step."""
        plan = self.scheduler.plan(clock())
        if not plan.items:
            return self.scheduler.take_events()
        try:
            result = self.runner.start(plan).wait()
        except BaseException as error:
            # Torn in the middle: what the step wrote cannot be trusted, and nothing may wait for it for ever.
            rows = {item.sequence_id: RowResult(error=f"the step was broken off: {error!r}") for item in plan.items}
            self.scheduler.apply(StepResult(plan.step, rows), clock())
            raise
        return self.scheduler.apply(result, clock())

    def close(self) -> None:
        """Give the runner's memory back."""
        self.runner.close()
