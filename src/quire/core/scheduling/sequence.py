"""A sequence: one continuation of a request, with its known tokens, its block table and its status.

WAITING ──► RUNNING ──► FINISHED
   ▲           │            ▲
   └─preempted─┘            │
   └── cancelled, deadline ─┘
"""

from dataclasses import InitVar, dataclass, field
from enum import Enum

from quire.core.memory.block_table import BlockTable
from quire.core.request import Request
from quire.core.scheduling.acceptance_rates import AcceptanceRate
from quire.errors import InvariantError


class SequenceStatus(Enum):
    """The status of a sequence."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


FEW_TOKENS = 16
"""Number of tokens of one sequence that a step computes in little more time than a single token."""
TRANSITIONS = {
    (SequenceStatus.WAITING, SequenceStatus.RUNNING),
    (SequenceStatus.RUNNING, SequenceStatus.WAITING),
    (SequenceStatus.WAITING, SequenceStatus.FINISHED),
    (SequenceStatus.RUNNING, SequenceStatus.FINISHED),
}


@dataclass(eq=False, slots=True)
class Sequence:
    """One continuation of a request. All its `tokens` are known; the leading ones are computed, with KV in `table`."""

    sequence_id: int
    request: Request
    key: tuple[float, int]
    """Scheduling order: a smaller (earlier) key is more urgent. Unique and constant (`WaitingQueue.key`)."""
    index: int = 0
    produced: InitVar[tuple[int, ...]] = ()
    tokens: list[int] = field(init=False)
    num_prompt_tokens: int = field(init=False)
    table: BlockTable | None = None
    status: SequenceStatus = field(default=SequenceStatus.WAITING, init=False)
    siblings: list["Sequence"] = field(default_factory=list)
    """The request's other continuations until they are forked, when all prompt tokens but the last are computed."""
    num_cached_tokens: int = 0
    """Prompt tokens found in the cache before the first preemption."""
    num_charged: int = 0
    """The tenant is not charged for computing tokens before this position: this sequence or its leader already did."""
    num_preemptions: int = 0
    acceptance_rates: dict[int, AcceptanceRate] = field(default_factory=dict)
    """Draft source -> acceptance rate."""
    draft_source: int = 0
    """Source of the last draft."""
    token_bytes: bytearray = field(default_factory=bytearray)
    """A copy of the leading tokens as bytes, for the n-gram search (`ngrams`)."""

    def __post_init__(self, produced: tuple[int, ...]) -> None:
        self.tokens = [*self.request.prompt, *produced]
        self.num_prompt_tokens = len(self.request.prompt)

    @property
    def num_output_tokens(self) -> int:
        """Number of tokens after the client's prompt, including those from before a crash."""
        return len(self.tokens) - self.num_prompt_tokens

    @property
    def num_uncomputed(self) -> int:
        """Number of known tokens that are not computed yet; at least one while the sequence runs."""
        return len(self.tokens) - (self.table.num_computed if self.table is not None else 0)

    @property
    def num_decoding(self) -> int:
        """Number of uncomputed tokens if the sequence decodes (a single one, or a few after the prompt); else 0."""
        num_computed = 0 if self.table is None else self.table.num_computed
        num_uncomputed = len(self.tokens) - num_computed
        is_decoding = num_uncomputed == 1 or (num_uncomputed <= FEW_TOKENS and num_computed >= self.num_prompt_tokens)
        return num_uncomputed if is_decoding else 0

    @property
    def fork_point(self) -> int | None:
        """The position at which siblings are forked: the last prompt token; None if no siblings wait."""
        return self.num_prompt_tokens - 1 if self.siblings else None

    def swap_roles(self, other: "Sequence") -> None:
        """Swap index and tokens with another continuation of the same request. Keys and tables are not swapped, so this
        is valid only while nothing beyond the prompt is computed.
        """
        self.index, other.index = other.index, self.index
        self.tokens, other.tokens = other.tokens, self.tokens
        self.token_bytes, other.token_bytes = other.token_bytes, self.token_bytes

    def move(self, status: SequenceStatus) -> None:
        """Change the status. Raises InvariantError for an illegal transition."""
        if (self.status, status) not in TRANSITIONS:
            raise InvariantError(f"sequence {self.sequence_id} cannot go from {self.status.value} to {status.value}")
        self.status = status


def table_of(sequence: Sequence) -> BlockTable:
    """Return the table of a running sequence. Raises InvariantError if it has none."""
    if sequence.table is None:
        raise InvariantError(f"expected sequence {sequence.sequence_id} to run, got one without a block table")
    return sequence.table
