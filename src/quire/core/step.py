"""The messages between the core, which plans a step, and a runner, which computes it.

They are plain data, so that a plan can be logged, replayed and sent to another process: tokens and block ids are
integers, and there are no tensors. They are named tuples, because every step creates hundreds of them.

A work item feeds consecutive tokens and says what to compute at which position:

    fed          t4 t5 t6 │ g7 g8        known tokens, then draft tokens
    positions     4  5  6    7  8
    sampling             └─7─┴8─┴9       the token at 7 and, as long as the drafts are correct, at 8 and 9
    scoring          └─5                 the log-probability of a known token at 5
    hidden               6               the last hidden state at 6
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from quire.core.request import ResolvedSampling


class SlotCopy(NamedTuple):
    """Copy one state slot (recurrent state) to another. The core plans the copy; the runner makes it."""

    src: int
    dst: int


class BlockCopy(NamedTuple):
    """Copy one whole KV block before the step writes anything. The core plans the copy; the runner makes it."""

    src: int
    dst: int


class Sampling(NamedTuple):
    """Sample the token at `position`: a pure function of these fields, the logits row and the grammar mask."""

    params: ResolvedSampling
    seed: int
    sequence_index: int
    """Index of the continuation in its request; with seed and position it determines the random number."""
    position: int
    """Position of the sampled token. Tokens that the item feeds from this position on are drafts."""
    num_prompt_tokens: int
    known_tokens: tuple[int, ...] | None
    """All tokens before `position` if the parameters need them; else None."""

    @property
    def num_output_tokens(self) -> int:
        """Number of tokens produced before this one."""
        return self.position - self.num_prompt_tokens

    def after(self, drafts: tuple[int, ...]) -> "Sampling":
        """Return the sampling of the position after these drafts, as if they were known tokens."""
        known = None if self.known_tokens is None else self.known_tokens + drafts
        return self._replace(position=self.position + len(drafts), known_tokens=known)


class Scoring(NamedTuple):
    """Report the log-probabilities of these known tokens at consecutive positions."""

    first_position: int
    """Position of the first token. All tokens before each scored position are fed by the item or already computed."""
    token_ids: tuple[int, ...]
    num_alternatives: int
    """Number of most likely tokens to report in addition to each scored token."""


class WorkItem(NamedTuple):
    """The work of one sequence in a step: feed `token_ids`, starting at `first_position`, with KV in `block_ids`."""

    sequence_id: int
    token_ids: tuple[int, ...]
    """At least one known token; after the last known token there may be drafts."""
    first_position: int
    block_ids: tuple[int, ...]
    """Blocks for all positions up to the last fed token. KV slots after that position must not be read."""
    sampling: Sampling | None = None
    """Sample the token after the known ones, and one after each correct draft. None: sample nothing."""
    scoring: Scoring | None = None
    hidden_positions: tuple[int, ...] = ()
    """Fed positions whose last hidden state is returned."""
    adapter: str = ""
    """The LoRA adapter to compute with; empty for the base model."""
    state_slot: int = 0
    """Slot of the recurrent state, read before the first fed token, written after the last; 0: no recurrent layers."""

    @property
    def num_drafts(self) -> int:
        return 0 if self.sampling is None else self.first_position + len(self.token_ids) - self.sampling.position

    @property
    def drafts(self) -> tuple[int, ...]:
        return self.token_ids[len(self.token_ids) - self.num_drafts :]

    def num_true_tokens(self, num_taken: int) -> int:
        """Return how many fed tokens belong to the sequence after it accepts `num_taken` sampled tokens. Of these, the
        last was not fed; those before it were fed as drafts.
        """
        if self.sampling is None:
            return len(self.token_ids)
        return self.sampling.position + num_taken - 1 - self.first_position

    def samplings(self) -> tuple[Sampling, ...]:
        """Return one `Sampling` per position to sample at, each as if the drafts before it were known tokens."""
        first = self.sampling
        if first is None:
            return ()
        drafts = self.token_ids[first.position - self.first_position :]
        return (first, *(first.after(drafts[:count]) for count in range(1, len(drafts) + 1))) if drafts else (first,)


class StepPlan(NamedTuple):
    """The work of one step: first the copies, then all items in one batch (in any order), then `keeps`."""

    step: int
    copies: tuple[BlockCopy, ...]
    items: tuple[WorkItem, ...]
    slot_copies: tuple[SlotCopy, ...] = ()
    """State copies to make before the items, in this order, because a copy may read a slot that an earlier copy wrote.
    Slot 0 contains the state before the first token."""
    keeps: tuple[SlotCopy, ...] = ()
    """State copies to make after all items, from running slots to slots that no item uses: states to be cached."""
    held: tuple[int, ...] = ()
    """Running sequences left out of this step because of work outside it, such as an unfinished grammar mask."""


Masks = Mapping[int, Sequence[bytes]]
"""Sequence id -> one bit mask of allowed tokens per sampled position: bit t % 8 of byte t // 8 is set if token t is
allowed. A sequence without an entry may sample any token."""
NO_MASKS: Masks = MappingProxyType({})


class TokenLogprobs(NamedTuple):
    """Log-probabilities of one token and of the most likely alternatives, computed from the raw logits."""

    token_id: int
    logprob: float
    rank: int
    alternatives: tuple[tuple[int, float], ...]


class RowError(NamedTuple):
    """The reason why a row (one sequence's work item) failed: a code for programs, and a message."""

    code: str
    message: str


UNSATISFIABLE = "unsatisfiable_request"
"""Error code of a row whose sampling parameters contradict each other: an error of the client."""
GRAMMAR_FAILED = "grammar_failed"
"""Error code of a row whose grammar failed during generation: also an error of the client."""
ROW_FAILED = "row_failed"
"""Error code of any other failed row: an error of the model or the device."""
NO_TOKEN_LEFT = RowError(UNSATISFIABLE, "no token is left to choose: all are banned, not allowed, or stop too early")
INFINITE_NUMBERS = RowError(UNSATISFIABLE, "penalties and biases make the row's numbers infinite")


class RowResult(NamedTuple):
    """The result of one work item."""

    token_ids: tuple[int, ...] = ()
    """The sampled tokens: the correct drafts and one more token. Empty if the item has no sampling."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One entry per sampled token, if the parameters request log-probabilities."""
    scores: tuple[TokenLogprobs, ...] = ()
    """One entry per token of the item's `scoring`."""
    hidden_states: tuple[bytes, ...] = ()
    """One entry per position of the item's `hidden_positions`: little-endian float32."""
    error: RowError | None = None
    """The error if this row failed. Other rows are not affected, and the blocks it wrote are never cached."""
    forced: tuple[int, ...] = ()
    """Tokens after the sampled ones that are the only ones the grammar allows: known without sampling, not yet fed."""
    work_tokens: int = 0
    """Processor time of work outside the step (grammar masks), charged to the tenant as computed prompt tokens."""


class StepResult(NamedTuple):
    """The results of one step."""

    step: int
    rows: dict[int, RowResult]
    """Sequence id -> result, for exactly the items of the plan."""
