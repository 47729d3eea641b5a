"""The configuration of a simulation: workload, server size and faults, from a scenario and a seed."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from random import Random

from quire.backends.protocol import Capacity
from quire.core.memory.kv_config import KVMemoryConfig
from quire.core.scheduling.scheduler_config import SchedulerConfig
from quire.core.scheduling.waiting_queue import QueueConfig
from quire.errors import ConfigError
from quire.sim.server.fault_plan import FaultRates
from quire.sim.server.guesses import Guesser
from quire.workload.scenarios import SCENARIOS

CHAOTIC = ("chaos", "drafts", "hybrid")
"""Scenarios with random server sizes and all kinds of faults."""
PIN_SHARE = 0.25
"""Share of the KV blocks that prefixes may pin; simulated clients sometimes pin prefixes."""


@dataclass(frozen=True, slots=True)
class ServerSize:
    """Sizes of a simulated server. A step takes `step_s`, plus `token_s` for each token that it computes."""

    num_blocks: int = 2048
    block_size: int = 32
    max_step_tokens: int = 256
    max_running: int = 64
    max_requests: int = 512
    vocabulary_size: int = 1000
    step_s: float = 0.02
    token_s: float = 0.001
    tenant_weights: Mapping[str, float] = field(default_factory=dict)
    num_slots: int = 0
    """Slots for recurrent state, at least `max_running` + 1; 0: the model has none."""

    def memory(self) -> KVMemoryConfig:
        """Return the configuration of the server's KV memory."""
        num_running = self.max_running + 1 if self.num_slots else 0
        return KVMemoryConfig(
            self.num_blocks, self.block_size, PIN_SHARE, num_slots=self.num_slots, num_running_slots=num_running
        )

    def scheduler(self) -> SchedulerConfig:
        """Return the configuration of the server's scheduler."""
        queue = QueueConfig(self.max_requests, tenant_weights=self.tenant_weights)
        return SchedulerConfig(self.max_step_tokens, self.max_running, queue=queue)

    def capacity(self) -> Capacity:
        """Return the capacity of the server's runner."""
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
        """Return the duration of a step with this many tokens."""
        return self.step_s + self.token_s * num_tokens


@dataclass(frozen=True, slots=True)
class SimConfig:
    """The workload, the server and its faults."""

    scenario: str
    seed: int
    num_requests: int
    shape: ServerSize
    faults: FaultRates
    guesser: Guesser | None = None


def make_config(scenario: str, seed: int, num_requests: int | None = None) -> SimConfig:
    """Return the simulation for a scenario and a seed. Chaotic scenarios choose the server and the faults at random;
    `drafts` also chooses a source of draft tokens, `hybrid` the slots for recurrent state. The others are fixed. Raises
    ConfigError for an unknown scenario."""
    if scenario not in SCENARIOS:
        raise ConfigError(f"expected a scenario of {', '.join(SCENARIOS)}, got {scenario!r}")
    if scenario not in CHAOTIC:
        return SimConfig(scenario, seed, num_requests or 400, ServerSize(), FaultRates())
    random = Random(f"shape {seed}")
    count = int(200 * 10 ** random.random())  # always drawn, so that an explicit number does not change the server
    shape, faults = small_shape(random, num_tenants=5), FaultRates.choose(random)
    config = SimConfig(scenario, seed, num_requests or count, shape, faults)
    if scenario == "chaos":
        return config
    if scenario == "hybrid":
        num_cached_slots = Random(f"slots {seed}").choice((0, 1, shape.max_running, 4 * shape.max_running))
        return replace(config, shape=replace(shape, num_slots=shape.max_running + 1 + num_cached_slots))
    # Most of these servers have no token budget left for drafts; half of them get some.
    larger = replace(shape, max_step_tokens=shape.max_step_tokens + Random(f"room {seed}").choice((0, 64)))
    return replace(config, shape=larger, guesser=Guesser.choose(seed, shape.vocabulary_size))


def small_shape(random: Random, num_tenants: int) -> ServerSize:
    """Return a random server, nearly always too small: little memory, few running sequences, a small token budget."""
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
