"""One continuation of a request on its way to tokens: what it has, what is computed, where its blocks are.

WAITING ──► RUNNING ──► FINISHED
   ▲           │            ▲
   └─preempted─┘            │
   └──── cancelled, late ───┘
"""

from enum import Enum

from quire.core.memory.block_table import BlockTable
from quire.core.request import FinishReason, Request
from quire.core.scheduling.acceptance_rates import AcceptanceRate
from quire.errors import InvariantError


class SequenceStatus(Enum):
    """Where a sequence is in its life."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


FEW_TOKENS = 16
"""Known tokens that a step computes for little more than one of them."""
LEGAL_MOVES = {
    (SequenceStatus.WAITING, SequenceStatus.RUNNING),
    (SequenceStatus.RUNNING, SequenceStatus.WAITING),
    (SequenceStatus.WAITING, SequenceStatus.FINISHED),
    (SequenceStatus.RUNNING, SequenceStatus.FINISHED),
}


class Sequence:
    """One continuation on its way: known tokens, computed tokens, and the blocks that hold them."""

    __slots__ = (
        "acceptance_rates",
        "finish_reason",
        "guess_source",
        "index",
        "key",
        "num_cached_tokens",
        "num_charged",
        "num_preemptions",
        "num_prompt_tokens",
        "request",
        "sequence_id",
        "siblings",
        "status",
        "table",
        "token_bytes",
        "tokens",
    )

    def __init__(
        self,
        sequence_id: int,
        request: Request,
        key: tuple[float, int],
        index: int = 0,
        produced: tuple[int, ...] = (),
    ) -> None:
        self.sequence_id = sequence_id
        self.request = request
        self.index = index
        self.key = key
        """Urgency: smaller is more urgent, equal for no two sequences, constant for life."""
        self.tokens = [*request.prompt, *produced]
        self.num_prompt_tokens = len(request.prompt)
        self.table: BlockTable | None = None
        self.status = SequenceStatus.WAITING
        self.siblings: list[Sequence] = []
        """Continuations that begin once this one has computed all of the prompt but its last token."""
        self.num_cached_tokens = 0
        """Prompt tokens that were not computed before the first preemption."""
        self.num_charged = 0
        """Tokens up to here have been computed or charged before: doing it again is free."""
        self.num_preemptions = 0
        self.acceptance_rates: dict[int, AcceptanceRate] = {}
        """What came of its guesses, by their sources."""
        self.guess_source = 0
        """Of the last one."""
        self.token_bytes = bytearray()
        """Its first tokens once more, as far as they were searched (`ngrams`)."""
        self.finish_reason: FinishReason | None = None

    @property
    def num_output_tokens(self) -> int:
        """Tokens produced since the client's prompt, before and after any crash."""
        return len(self.tokens) - self.num_prompt_tokens

    @property
    def num_uncomputed(self) -> int:
        """Known tokens whose KV is not there yet; at least one while it runs."""
        return len(self.tokens) - (self.table.num_computed if self.table is not None else 0)

    @property
    def num_decoding(self) -> int:
        """Tokens it computes ahead of all chunks: the only one it has left, or a few behind its prompt; else none."""
        num_computed = 0 if self.table is None else self.table.num_computed
        num_left = len(self.tokens) - num_computed
        is_few = num_left == 1 or (num_left <= FEW_TOKENS and num_computed >= self.num_prompt_tokens)
        return num_left if is_few else 0

    @property
    def fork_point(self) -> int | None:
        """Where its siblings branch off; None when it has none to wait for it."""
        return self.num_prompt_tokens - 1 if self.siblings else None

    def swap_answers(self, other: "Sequence") -> None:
        """Become the other continuation of the same request, and let it become this one. Places, keys and blocks stay:
        right only while nothing beyond the prompt is computed.
        """
        self.index, other.index = other.index, self.index
        self.tokens, other.tokens = other.tokens, self.tokens
        self.token_bytes, other.token_bytes = other.token_bytes, self.token_bytes

    def move(self, status: SequenceStatus) -> None:
        """Change status, if the move is legal."""
        if (self.status, status) not in LEGAL_MOVES:
            raise InvariantError(f"sequence {self.sequence_id} cannot go from {self.status.value} to {status.value}")
        self.status = status


def table_of(sequence: Sequence) -> BlockTable:
    """The table of a sequence that runs."""
    if sequence.table is None:
        raise InvariantError(f"sequence {sequence.sequence_id} has no blocks: it does not run")
    return sequence.table
