"""Size of the simulated server and duration of its steps."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from random import Random

from quire.backends.protocol import Capacity
from quire.core.memory.kv_config import KVMemoryConfig
from quire.core.scheduling.scheduler_config import SchedulerConfig
from quire.core.scheduling.waiting_queue import QueueConfig


@dataclass(frozen=True, slots=True)
class ServerSize:
    """Sizes of a simulated server. A step takes `step_s` and `token_s` for each token it feeds."""

    num_blocks: int = 2048
    block_size: int = 32
    max_step_tokens: int = 256
    max_running: int = 64
    max_requests: int = 512
    vocabulary_size: int = 1000
    step_s: float = 0.02
    token_s: float = 0.001
    step_limit_s: float = 0.0
    """Time limit of a step with prefill; 0: no limit."""
    tenant_weights: Mapping[str, float] = field(default_factory=dict)
    pin_share: float = 0.25
    """Pinned share of the pool; simulated clients sometimes pin prefixes."""
    num_slots: int = 0
    """Slots for recurrent state, at least `max_running` + 1; 0: none."""

    def memory(self) -> KVMemoryConfig:
        """Settings of its KV memory."""
        num_running = self.max_running + 1 if self.num_slots else 0
        return KVMemoryConfig(
            self.num_blocks,
            self.block_size,
            self.pin_share,
            num_slots=self.num_slots,
            num_running_slots=num_running,
        )

    def scheduler(self) -> SchedulerConfig:
        """Settings of its scheduler."""
        queue = QueueConfig(self.max_requests, tenant_weights=self.tenant_weights)
        return SchedulerConfig(self.max_step_tokens, self.max_running, queue=queue, step_limit_s=self.step_limit_s)

    def capacity(self) -> Capacity:
        """Capacity of its runner."""
        return Capacity(
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            max_sequence_tokens=1 << 30,
            max_step_tokens=self.max_step_tokens,
            vocabulary_size=self.vocabulary_size,
            num_kv_bytes=8 * self.block_size,
            num_slots=self.num_slots,
        )

    def duration_s(self, num_tokens: int) -> float:
        """Duration of a step with this many tokens."""
        return self.step_s + self.token_s * num_tokens


def small_shape(random: Random, num_tenants: int) -> ServerSize:
    """A random server that is nearly always too small: little memory, few slots, a tight budget."""
    block_size = random.choice((1, 2, 4, 8))
    max_running = random.choice((2, 4, 8, 16))
    return ServerSize(
        num_blocks=random.choice((72, 128, 220, 400)) // block_size,
        block_size=block_size,
        max_step_tokens=max_running + block_size + random.choice((0, 8, 40)),
        max_running=max_running,
        max_requests=random.choice((10, 50, 512)),
        vocabulary_size=random.choice((3, 8, 20)),
        tenant_weights={f"tenant{index}": random.choice((1.0, 2.0)) for index in range(num_tenants)},
    )
