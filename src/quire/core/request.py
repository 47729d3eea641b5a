"""What a client asked, and the sequences that answer it. Plain data and legal status moves; decides nothing.

A **request** asks for one or more continuations of a prompt. Each continuation becomes a **sequence**: the prompt, the
tokens sampled so far, and a block table while it runs.

    WAITING ──► RUNNING ──► FINISHED
       ▲           │            ▲
       └─preempted─┘            │
       └──── cancelled, late ───┘
"""

from enum import Enum

import msgspec

from quire.core.block_table import BlockTable
from quire.core.chances import Chance
from quire.core.digests import Namespace
from quire.errors import InvariantError


class PriorityClass(Enum):
    """How urgent a request is. Worth a head start in the queue, never more: see `waiting_queue`."""

    HIGH = "high"
    NORMAL = "normal"
    LOW = "low"


class FinishReason(Enum):
    """Why a sequence, or a whole request, ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    DEADLINE = "deadline"
    ERROR = "error"
    DISPLACED = "displaced"
    """It waited, and its place went to a tenant that was below its share."""


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


class ResolvedSampling(msgspec.Struct, frozen=True):
    """How tokens are chosen. Every value is valid: it was checked when the request was parsed."""

    max_tokens: int = 16
    """How many tokens may be produced, counted from the end of the client's prompt. 0: it ends when its prompt is
    computed.
    """
    temperature: float = 1.0
    """0 takes the likeliest token."""
    top_k: int = 0
    """Keep the k likeliest tokens; 0 keeps all."""
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    banned_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    """Stop tokens cannot be chosen before this many tokens have been produced."""
    stop_token_ids: frozenset[int] = frozenset()
    """Tokens that end the sequence; the model's own end-of-text tokens are among them unless the client asked not."""
    logprobs: int | None = None
    """How many alternatives to report beside the chosen token; None reports nothing."""
    prompt_logprobs: int | None = None
    """The same for the prompt's tokens. Such a request reads no cached block: it needs every row computed."""

    @property
    def needs_known_tokens(self) -> bool:
        """Whether choosing a token needs the tokens before it."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


class Continuation(msgspec.Struct, frozen=True):
    """One of the answers a request asks for; after a crash, or from elsewhere, with the tokens it had already."""

    index: int = 0
    produced: tuple[int, ...] = ()


class Request(msgspec.Struct, frozen=True):
    """What a client asked, checked."""

    request_id: str
    prompt: tuple[int, ...]
    namespace: Namespace
    arrival_s: float
    """On the clock of whoever holds it, as its deadline: between processes it is an age (`engine.commands`)."""
    params: ResolvedSampling = ResolvedSampling()
    seed: int = 0
    """Drawn at admission if the client gave none, so that a crash changes nothing."""
    tenant: str = "default"
    priority: PriorityClass = PriorityClass.NORMAL
    continuations: tuple[Continuation, ...] = (Continuation(),)
    """One for each answer still wanted."""
    deadline_s: float | None = None
    is_explained: bool = False
    """Whether its admission is to say why the next token was not found in the cache."""
    is_promised: bool = False
    """Its tenant was told to come back at this time, or it was let in before: it is let in whatever waits."""
    epoch: int = 0
    """Which assignment to an engine this is, larger than all before it; counted by whoever assigns, and told with every
    event."""
    grammar: str | None = None
    """What every answer must match, from its first token to its last; opaque here."""
    has_stop_texts: bool = False
    """Whether texts may end its answers: they are found where tokens become text, and here nobody sees them."""
    work_tokens: int = 0
    """What its words have cost before it came here, in computed prompt tokens (`work_budget`)."""

    @property
    def adapter(self) -> str:
        """The LoRA it is computed with, which is part of what its blocks are named by; empty is the model itself."""
        return self.namespace.adapter

    @property
    def has_begun(self) -> bool:
        """An engine before this one produced tokens of it."""
        return any(one.produced for one in self.continuations)


class Sequence:
    """One continuation on its way: known tokens, computed tokens, and the blocks that hold them."""

    __slots__ = (
        "chances",
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
        self.chances: dict[int, Chance] = {}
        """What came of its guesses, by their sources."""
        self.guess_source = 0
        """Of the last one."""
        self.token_bytes = bytearray()
        """Its first tokens once more, as far as somebody has searched them (`ngrams`)."""
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
