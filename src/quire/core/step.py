"""The messages between the core, which plans a step, and a runner, which computes it.

They are plain data, so that a plan can be logged, replayed and sent to another process: tokens and block ids are
integers, and there are no tensors. They are named tuples, because every step creates hundreds of them.

A work item feeds consecutive tokens to the model and lists what to compute at which position:

    fed          t4 t5 t6 │ d7 d8        known tokens, then draft tokens
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
    """Sample the token at `position`. The result depends only on these fields, the logits and the grammar mask."""

    params: ResolvedSampling
    seed: int
    sequence_index: int
    """Index of the continuation in its request. Seed, index and position determine the random number."""
    position: int
    """Position of the sampled token. Tokens that the item feeds from this position on are drafts."""
    num_prompt_tokens: int
    known_tokens: tuple[int, ...] | None
    """All tokens before `position` if `params.needs_known_tokens`; else None."""

    @property
    def num_output_tokens(self) -> int:
        """Number of tokens produced before this one."""
        return self.position - self.num_prompt_tokens

    def after(self, drafts: tuple[int, ...]) -> "Sampling":
        """Return the `Sampling` for the position after these drafts, as if they were known tokens."""
        known_tokens = None if self.known_tokens is None else self.known_tokens + drafts
        return self._replace(position=self.position + len(drafts), known_tokens=known_tokens)


class Scoring(NamedTuple):
    """Report the log-probabilities of these known tokens at consecutive positions."""

    first_position: int
    """Position of the first token. All tokens before each scored position are fed by the item or already computed."""
    token_ids: tuple[int, ...]
    num_alternatives: int
    """Number of most likely tokens to report at each position, in addition to its scored token."""


class WorkItem(NamedTuple):
    """The work of one sequence in a step: feed `token_ids`, starting at `first_position`, with KV in `block_ids`."""

    sequence_id: int
    token_ids: tuple[int, ...]
    """The tokens to feed: at least one known token; drafts may follow the last known token of the sequence."""
    first_position: int
    block_ids: tuple[int, ...]
    """The blocks of all positions from 0 to the last fed token. KV slots after that position must not be read."""
    sampling: Sampling | None = None
    """Sample the token after the known tokens, and one after each correct draft. None: sample nothing."""
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

    def num_true_tokens(self, num_accepted: int) -> int:
        """Return how many fed tokens are valid if the sequence accepts `num_accepted` sampled tokens. The last accepted
        token was not fed; the others were fed as drafts.
        """
        if self.sampling is None:
            return len(self.token_ids)
        return self.sampling.position + num_accepted - 1 - self.first_position

    def samplings(self) -> tuple[Sampling, ...]:
        """Return one `Sampling` per position to sample at, each as if the drafts before it were known tokens."""
        first = self.sampling
        if first is None:
            return ()
        drafts = self.token_ids[first.position - self.first_position :]
        return (first, *(first.after(drafts[:count]) for count in range(1, len(drafts) + 1))) if drafts else (first,)


class StepPlan(NamedTuple):
    """The work of one step: both kinds of copies, then all items in one batch (in any order), then `cache_copies`."""

    step: int
    copies: tuple[BlockCopy, ...]
    items: tuple[WorkItem, ...]
    slot_copies: tuple[SlotCopy, ...] = ()
    """State copies to make before the items, in this order, because a copy may read a slot that an earlier copy wrote.
    Slot 0 contains the state before the first token."""
    cache_copies: tuple[SlotCopy, ...] = ()
    """State copies to make after all items, from slots of items to slots that no item uses: the states to be cached."""
    waiting_ids: tuple[int, ...] = ()
    """Ids of running sequences that are left out of this step until other work (a grammar mask) is finished."""


Masks = Mapping[int, Sequence[bytes]]
"""Sequence id -> for each sampled position a bit mask of allowed tokens: bit t % 8 of byte t // 8 is set if token t is
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
    """Tokens after the sampled ones, each the only token that the grammar allows there. They are not sampled or fed."""
    work_tokens: int = 0
    """Processor time spent on grammar masks, converted to computed prompt tokens and charged to the tenant."""
    forced_at: tuple[int, ...] = ()
    """Positions in `token_ids` of accepted drafts that the grammar would have forced."""

    def is_forced(self, index: int) -> bool:
        """Return whether a grammar forced the token at `index` of the sampled and forced tokens."""
        return index >= len(self.token_ids) or index in self.forced_at


class StepResult(NamedTuple):
    """The results of one step."""

    step: int
    rows: dict[int, RowResult]
    """Sequence id -> result, for exactly the items of the plan."""
