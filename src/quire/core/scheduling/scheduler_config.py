"""The scheduler's settings and counters, its record of a request, and the blocks and tokens that sequences need."""

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
    """Maximum number of concurrently running sequences; a request with n continuations has n sequences."""
    max_sequence_tokens: int = 1 << 30
    """Maximum length of a sequence, prompt and output together."""
    watermark: float = 0.01
    """Fraction of the KV pool that stays free when a waiting sequence starts, for the growth of running sequences."""
    queue: QueueConfig = field(default_factory=QueueConfig)
    step_cost: StepCost | None = None
    """Cost model that decides which drafts pay off. None: use as many drafts as fit."""
    step_limit_s: float = 0.0
    """Target duration of steps with prefill chunks; each step feeds at least one block of a prompt. 0: no target."""
    pin_share: float = 0.25
    """Largest fraction of the KV pool that pins may use; the memory of an engine is made with it."""

    def check(self, memory: KVMemoryConfig) -> None:
        """Raise ConfigError for invalid settings, such as a token budget too small for progress, or too few slots."""
        min_step_tokens = self.max_running + memory.block_size
        if self.max_step_tokens < min_step_tokens:
            raise ConfigError(
                f"expected max_step_tokens of at least max_running + block size = {min_step_tokens}, got "
                f"{self.max_step_tokens}; raise it, or lower max_running",
                code="step_budget_too_small",
            )
        if memory.num_slots and memory.num_running_slots <= self.max_running:
            raise ConfigError(
                f"expected at least max_running + 1 = {self.max_running + 1} state slots for running sequences, got "
                f"{memory.num_running_slots} of {memory.num_slots}; lower max_running",
                code="too_few_state_slots",
            )
        if not 0.0 <= self.step_limit_s < float("inf"):
            raise ConfigError(f"expected a finite step_limit_s of at least 0, got {self.step_limit_s}; 0: no limit")
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
    """The sequence that computes the prompt for all continuations; its cache hits are reported to the client."""
    num_unfinished: int
    num_prompt_reported: int = 1
    """Log-probabilities of prompt positions below this were reported; position 0 has none."""
    is_admitted: bool = False
    has_begun: bool = False
    """Whether the request has its first token, possibly from an earlier engine."""
    num_written_blocks: int = 0
    """Blocks that the request's sequences added to the cache before the first token."""
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
        self._chunks: list[tuple[tuple[float, int], int]] = []  # (key, number of tokens)

    def add(self, sequence: Sequence, num_blocks: int) -> "Needs":
        """Add the needs of a sequence; returns self."""
        self.num_blocks += num_blocks
        if num_decoding := sequence.num_decoding:
            self._num_decoding += num_decoding
        else:
            self._chunks.append((sequence.key, sequence.num_uncomputed))
        return self

    def num_tokens_before(self, key: tuple[float, int]) -> int:
        """Return how many tokens of a step come before this key: of decoding sequences and chunks with earlier keys."""
        return self._num_decoding + sum(num_tokens for chunk_key, num_tokens in self._chunks if chunk_key < key)
