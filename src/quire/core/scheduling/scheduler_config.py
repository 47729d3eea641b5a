"""The scheduler's settings, its totals, and what it keeps of a request. Data without behaviour."""

from collections.abc import Callable
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
    """Limits of one scheduler, fixed at start."""

    max_step_tokens: int = 256
    max_running: int = 64
    """Sequences that run at once; a request for n continuations needs n places."""
    max_sequence_tokens: int = 1 << 30
    """The longest sequence, prompt and output together."""
    watermark: float = 0.01
    """Share of the pool that admission leaves free for those that run already."""
    queue: QueueConfig = field(default_factory=QueueConfig)
    step_cost: StepCost | None = None
    """By which it is decided what guesses pay. None: all that there is room for."""
    step_limit_s: float = 0.0
    """How long a step may take that feeds prompts, a block of them aside; 0: as long as its tokens take."""

    def check(self, memory: KVMemoryConfig) -> None:
        """Refuse a token budget with which a step could fail to make progress, and too few state slots."""
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
    """A request from submission to its last event."""

    request: Request
    sequences: list[Sequence]
    leader: Sequence
    """The one that computes the prompt for all: what it finds in the cache is reported to the client."""
    num_unfinished: int
    num_prompt_reported: int = 1
    """Prompt positions below this have had their log-probabilities reported; the first has none."""
    is_admitted: bool = False
    has_begun: bool = False
    """It has had its first token, perhaps from an engine before this one."""
    retry_after_s: int | None = None
    """What its client receives if it is displaced."""


@dataclass(slots=True)
class SchedulerStats:
    """Totals since the start."""

    num_steps: int = 0
    num_computed_tokens: int = 0
    num_recomputed_tokens: int = 0
    """Of those, computed before by the same sequence: the price of preemption."""
    num_output_tokens: int = 0
    num_draft_tokens: int = 0
    """Fed as guesses beside the computed tokens."""
    num_accepted_tokens: int = 0
    """Of those, right: they are among the computed and the output tokens."""
    num_forced_tokens: int = 0
    """Output tokens that were not sampled: nothing else was allowed."""
    num_preemptions: int = 0
    num_finished: int = 0


@dataclass(frozen=True, slots=True)
class Blocked:
    """A head that did not fit: not tried again before a sequence stops running or a block comes free."""

    sequence_id: int
    num_free_blocks: int


class Needs:
    """What running sequences still need, added up once for a round of admissions."""

    __slots__ = ("_chunks", "_num_decoding", "num_blocks")

    def __init__(self) -> None:
        self.num_blocks = 0
        """For the tokens they have."""
        self._num_decoding = 0
        self._chunks: list[tuple[tuple[float, int], int]] = []

    @staticmethod
    def of(running: list[Sequence], num_blocks_wanted: Callable[[Sequence], int]) -> "Needs":
        """The needs of all that run."""
        needs = Needs()
        for sequence in running:
            needs.with_one_more(sequence, num_blocks_wanted(sequence))
        return needs

    def with_one_more(self, sequence: Sequence, num_blocks: int) -> "Needs":
        """Add one that has just started."""
        self.num_blocks += num_blocks
        if num_decoding := sequence.num_decoding:
            self._num_decoding += num_decoding
        else:
            self._chunks.append((sequence.key, sequence.num_uncomputed))
        return self

    def num_tokens_before(self, key: tuple[float, int]) -> int:
        """Tokens of a step that go to others first: to all that decode, and all chunks more urgent."""
        return self._num_decoding + sum(num_tokens for other, num_tokens in self._chunks if other < key)
