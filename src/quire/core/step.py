"""The frozen messages of the seam between the core, which decides, and a runner, which computes.

Plain data only: a plan must survive being logged, replayed and sent over a wire. Tokens and block ids are integers; no
tensor ever appears. Named tuples, because hundreds are made in every step.

An item feeds a run of tokens and has what is to be computed at which of its positions:

    fed          t4 t5 t6 │ g7 g8        known tokens, then drafts: guesses at what follows
    positions     4  5  6    7  8
    sampling             └─7─┴8─┴9       a token for 7 and, as far as the drafts are right, for 8 and 9
    scoring          └─5                 the log-probability of a given token standing at 5
    hidden               6               the last hidden state at 6
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from quire.core.request import ResolvedSampling


class SlotCopy(NamedTuple):
    """Copy one whole slot to another. The core plans it and never touches the data."""

    src: int
    dst: int


class BlockCopy(NamedTuple):
    """Copy one whole block before the step writes anything. The core plans it and never touches the data."""

    src: int
    dst: int


class Sampling(NamedTuple):
    """Choose the token at `position`. A pure function of this, the logits row, a mask, and nothing else."""

    params: ResolvedSampling
    seed: int
    sequence_index: int
    """Which continuation of its request: together with seed and position it names the one random number used."""
    position: int
    """Where the chosen token will stand. What an item feeds from here on are drafts."""
    num_prompt_tokens: int
    known_tokens: tuple[int, ...] | None
    """All tokens before `position`, where the parameters need them; else None."""

    @property
    def num_output_tokens(self) -> int:
        """How many tokens have been produced before this one."""
        return self.position - self.num_prompt_tokens

    def after(self, drafts: tuple[int, ...]) -> "Sampling":
        """The same request's next choice, were these drafts its tokens."""
        known = None if self.known_tokens is None else self.known_tokens + drafts
        return self._replace(position=self.position + len(drafts), known_tokens=known)


class Scoring(NamedTuple):
    """Report the log-probabilities of given tokens, each where it would stand."""

    first_position: int
    """Of the first of them; the others follow. All that stands before each of them is fed or computed."""
    token_ids: tuple[int, ...]
    num_alternatives: int
    """How many of the likeliest tokens to report beside each."""


class WorkItem(NamedTuple):
    """What one sequence does in a step: feed `token_ids` from `first_position` on, through its blocks."""

    sequence_id: int
    token_ids: tuple[int, ...]
    """Known tokens, at least one; behind the last known one perhaps drafts."""
    first_position: int
    block_ids: tuple[int, ...]
    """Enough blocks to hold every position up to the last one fed. Nothing beyond that position may be read."""
    sampling: Sampling | None = None
    """Choose the token that follows the known ones, and one after each draft that is right. None: choose nothing."""
    scoring: Scoring | None = None
    hidden_positions: tuple[int, ...] = ()
    """Fed positions whose last hidden state is returned."""
    adapter: str = ""
    """The LoRA to compute with; empty is the model itself."""
    state_slot: int = 0
    """Where the recurrent layers' state is before the first token fed and after the last; 0 of a model without."""

    @property
    def num_drafts(self) -> int:
        return 0 if self.sampling is None else self.first_position + len(self.token_ids) - self.sampling.position

    @property
    def drafts(self) -> tuple[int, ...]:
        return self.token_ids[len(self.token_ids) - self.num_drafts :]

    def num_true_tokens(self, num_taken: int) -> int:
        """How many of the tokens fed are the sequence's own, once it has taken this many of those chosen. The last of
        these has not been fed; those before it have, as drafts.
        """
        if self.sampling is None:
            return len(self.token_ids)
        return self.sampling.position + num_taken - 1 - self.first_position

    def samplings(self) -> tuple[Sampling, ...]:
        """One for each position at which a token is to be chosen, each as if the drafts before it were known."""
        first = self.sampling
        if first is None:
            return ()
        drafts = self.token_ids[first.position - self.first_position :]
        return (first, *(first.after(drafts[:count]) for count in range(1, len(drafts) + 1))) if drafts else (first,)


class StepPlan(NamedTuple):
    """What one step computes. Copies first, then all items, in any order and all at once; then states are kept."""

    step: int
    copies: tuple[BlockCopy, ...]
    items: tuple[WorkItem, ...]
    slot_copies: tuple[SlotCopy, ...] = ()
    """To make before the items, in this order: one may read what another has written. Slot 0 is the state before the
    first token."""
    keeps: tuple[SlotCopy, ...] = ()
    """To make when all items are done, from running slots to others that no item has."""
    held: tuple[int, ...] = ()
    """Running sequences that were left out because of work beside the step, as a mask that is still being made."""


Masks = Mapping[int, Sequence[bytes]]
"""Sequence id -> for each position at which it samples, which tokens may be chosen there: bit t % 8 of byte t // 8 is
set if token t may. One without an entry may choose any."""
NO_MASKS: Masks = MappingProxyType({})


class TokenLogprobs(NamedTuple):
    """Log-probability of one token, and the likeliest alternatives, of the raw logits."""

    token_id: int
    logprob: float
    rank: int
    alternatives: tuple[tuple[int, float], ...]


class RowError(NamedTuple):
    """Why a row failed: a code to decide by, and a message."""

    code: str
    message: str


UNSATISFIABLE = "unsatisfiable_request"
"""Code of rows whose requests contradict themselves: the client's error, not the model's."""
GRAMMAR_FAILED = "grammar_failed"
"""Code of rows whose grammars fail in the middle: the client's, too."""
ROW_FAILED = "row_failed"
"""Code of all others: the model's, or the device's."""
NO_TOKEN_LEFT = RowError(UNSATISFIABLE, "no token is left to choose: all are banned, not allowed, or stop too early")
INFINITE_NUMBERS = RowError(UNSATISFIABLE, "penalties and biases make the row's numbers infinite")


class RowResult(NamedTuple):
    """What one item came to."""

    token_ids: tuple[int, ...] = ()
    """The tokens chosen. Where the item has sampling: the drafts that were right, and one more; else none."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """Of each of them, where the parameters request it."""
    scores: tuple[TokenLogprobs, ...] = ()
    """Of each token the item scores."""
    hidden_states: tuple[bytes, ...] = ()
    """One for each of the item's `hidden_positions`: float32 numbers, little-endian."""
    error: RowError | None = None
    """Why this row failed. Others are not touched by it, and what it wrote is never named."""
    forced: tuple[int, ...] = ()
    """Tokens that follow those chosen because nothing else may: known without having been sampled, and not yet fed."""
    work_tokens: int = 0
    """What work beside the step costs this row's tenant, in computed prompt tokens (`work_budget`)."""


class StepResult(NamedTuple):
    """What a step returned, row by row."""

    step: int
    rows: dict[int, RowResult]
    """Sequence id -> result, for exactly the items of the plan."""
