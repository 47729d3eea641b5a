"""The scheduler's settings and counters, its record of a request, and the needs of running sequences."""

from dataclasses import dataclass, field

import msgspec

from quire.core.memory.kv_config import KVMemoryConfig
from quire.core.request import Request
from quire.core.scheduling.sequence import Sequence
from quire.core.scheduling.step_cost import StepCost
from quire.core.scheduling.waiting_queue import QueueConfig
from quire.errors import ConfigError


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Settings of one scheduler, fixed at start."""

    max_step_tokens: int = 256
    max_running: int = 64
    """Maximum number of concurrently running sequences; a request for n continuations counts as n."""
    max_sequence_tokens: int = 1 << 30
    """Length of the longest sequence, prompt and output together."""
    watermark: float = 0.01
    """Fraction of the pool that admission leaves free for running sequences."""
    queue: QueueConfig = field(default_factory=QueueConfig)
    step_cost: StepCost | None = None
    """Cost model that decides which drafts pay off. None: use as many drafts as fit."""
    step_limit_s: float = 0.0
    """Target duration of steps with prefill chunks; each step feeds at least one block of a prompt. 0: no target."""

    def check(self, memory: KVMemoryConfig) -> None:
        """Raise ConfigError for invalid settings, such as a token budget too small for progress, or too few slots."""
        needed = self.max_running + memory.block_size
        if self.max_step_tokens < needed:
            raise ConfigError(
                f"expected max_step_tokens of at least max_running + block size = {needed}, got "
                f"{self.max_step_tokens}; raise it, or lower max_running",
                code="step_budget_too_small",
            )
        if memory.num_slots and memory.num_running_slots <= self.max_running:
            raise ConfigError(
                f"expected state slots for max_running sequences and the next, {self.max_running + 1}, got "
                f"{memory.num_running_slots} of {memory.num_slots} for running sequences; lower max_running",
                code="too_few_state_slots",
            )
        if not 0.0 <= self.step_limit_s < float("inf"):
            raise ConfigError(f"expected a step_limit_s of 0 or more seconds, got {self.step_limit_s}; 0: no limit")
        if self.max_running < 1 or not 0.0 <= self.watermark < 1.0 or self.max_sequence_tokens < 2:
            raise ConfigError(
                "expected max_running of at least 1, watermark in [0, 1) and max_sequence_tokens of at least 2, got "
                f"{self.max_running}, {self.watermark} and {self.max_sequence_tokens}"
            )


class ActiveRequest(msgspec.Struct, eq=False):
    """The scheduler's record of a request, from submission to its last event."""

    request: Request
    sequences: list[Sequence]
    leader: Sequence
    """The sequence that computes the prompt for all; its cache hits are reported to the client."""
    num_unfinished: int
    num_prompt_reported: int = 1
    """Log-probabilities of prompt positions below this were reported; position 0 has none."""
    is_admitted: bool = False
    has_begun: bool = False
    """Whether the request has its first token, possibly from an earlier engine."""
    retry_after_s: int | None = None
    """Delay before a retry, sent to the client if the request was displaced."""


@dataclass(slots=True)
class SchedulerStats:
    """Totals since the start."""

    num_steps: int = 0
    num_computed_tokens: int = 0
    num_recomputed_tokens: int = 0
    """Computed tokens that the same sequence had computed before: the cost of preemption."""
    num_output_tokens: int = 0
    num_draft_tokens: int = 0
    """Draft tokens fed for verification."""
    num_accepted_tokens: int = 0
    """Accepted draft tokens; they also count as computed and as output tokens."""
    num_forced_tokens: int = 0
    """Output tokens that were not sampled, because the grammar allowed no other."""
    num_preemptions: int = 0


class Needs:
    """The blocks and tokens that running sequences still need, summed up once per round of admissions."""

    def __init__(self) -> None:
        self.num_blocks = 0
        """Blocks needed for all known tokens."""
        self._num_decoding = 0
        self._chunks: list[tuple[tuple[float, int], int]] = []

    def with_one_more(self, sequence: Sequence, num_blocks: int) -> "Needs":
        """Add the needs of one more sequence; returns self."""
        self.num_blocks += num_blocks
        if num_decoding := sequence.num_decoding:
            self._num_decoding += num_decoding
        else:
            self._chunks.append((sequence.key, sequence.num_uncomputed))
        return self

    def num_tokens_before(self, key: tuple[float, int]) -> int:
        """Return how many tokens of a step go to others first: to decoding sequences and to more urgent chunks."""
        return self._num_decoding + sum(num_tokens for other, num_tokens in self._chunks if other < key)
