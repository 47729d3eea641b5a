"""Submit, cancel, step: a scheduler, its memory and a runner, on one screen. Token ids in, events with token ids out.

    request ─► scheduler ─► plan ─► runner ─► result ─► scheduler ─► events

Text, streams, threads and processes are other rooms. The clock is handed in.
"""

from dataclasses import dataclass

from quire.backends.protocol import Runner
from quire.core.digests import BlockHasher, Namespace
from quire.core.events import RequestEvent
from quire.core.kv_memory import KVMemory
from quire.core.kv_shapes import KVMemoryConfig
from quire.core.request import Request
from quire.core.scheduler import Scheduler
from quire.core.scheduler_shapes import SchedulerConfig

FORMAT_VERSION = 1


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """What names a model's blocks beside their tokens."""

    fingerprint: str
    kv_layout: str


class Engine:
    """One model's requests. Not safe for threads: whoever owns it steps it."""

    def __init__(self, runner: Runner, config: SchedulerConfig, identity: ModelIdentity, key: bytes) -> None:
        capacity = runner.capacity
        self.runner = runner
        self.memory = KVMemory(KVMemoryConfig(capacity.num_blocks, capacity.block_size), BlockHasher(key))
        self.scheduler = Scheduler(config, self.memory)
        self._identity = identity

    @property
    def has_work(self) -> bool:
        """Whether a step could do something: a request is alive, or an event has not been told."""
        return bool(self.scheduler.live)

    def namespace(self, cache_group: str, adapter: str = "") -> Namespace:
        """The namespace of a tenant's blocks on this model."""
        one = self._identity
        return Namespace(
            FORMAT_VERSION, one.fingerprint, adapter, one.kv_layout, self.memory.config.block_size, cache_group
        )

    def submit(self, request: Request) -> None:
        """Queue a request, or raise RequestError or CapacityError and change nothing."""
        self.scheduler.submit(request)

    def cancel(self, request_id: str) -> None:
        """End a request; its last events come with a later step. Unknown ids are none of our business."""
        self.scheduler.cancel(request_id)

    def step(self, now_s: float) -> list[RequestEvent]:
        """Plan, run, apply; what happened to whom."""
        plan = self.scheduler.plan(now_s)
        if not plan.items:
            return self.scheduler.take_events()
        return self.scheduler.apply(self.runner.start(plan).wait(), now_s)

    def close(self) -> None:
        """Give the runner's memory back."""
        self.runner.close()
