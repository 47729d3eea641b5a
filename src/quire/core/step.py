"""The frozen messages of the seam between the core, which decides, and a runner, which computes.

Plain data only: a plan must survive being logged, replayed and sent over a wire. Tokens and block ids are integers; no
tensor ever appears. Named tuples, because hundreds are made in every step.
"""

from typing import NamedTuple

from quire.core.request import ResolvedSampling


class BlockCopy(NamedTuple):
    """Copy one whole block before the step writes anything. The core plans it and never touches the data."""

    src: int
    dst: int


class Sampling(NamedTuple):
    """Choose a token after the last one fed. A pure function of this, the logits row, and nothing else."""

    params: ResolvedSampling
    seed: int
    sequence_index: int
    """Which continuation of its request: together with seed and position it names the one random number used."""
    position: int
    """Where the chosen token will stand."""
    num_prompt_tokens: int
    known_tokens: tuple[int, ...] | None
    """All tokens before `position`, where the parameters need them; else None."""

    @property
    def num_output_tokens(self) -> int:
        """How many tokens have been produced before this one."""
        return self.position - self.num_prompt_tokens


class WorkItem(NamedTuple):
    """What one sequence does in a step: feed `token_ids` from `first_position` on, through its blocks."""

    sequence_id: int
    token_ids: tuple[int, ...]
    first_position: int
    block_ids: tuple[int, ...]
    """Enough blocks to hold every position up to the last one fed. Nothing beyond that position may be read."""
    sampling: Sampling | None
    """None while tokens are still known beyond those fed."""
    prompt_targets: tuple[int, ...]
    """Prompt tokens that follow the first of the fed ones: report their log-probabilities. Empty reports nothing."""
    num_prompt_alternatives: int
    """How many alternatives to report beside each of them."""


class StepPlan(NamedTuple):
    """What one step computes. Copies first, then all items, in any order and all at once."""

    step: int
    copies: tuple[BlockCopy, ...]
    items: tuple[WorkItem, ...]
    dropped_sequence_ids: tuple[int, ...]
    """What a runner keeps for these sequences may be dropped: they ended, or begin again with other blocks."""


class TokenLogprobs(NamedTuple):
    """Log-probability of one token, and the likeliest alternatives, of the raw logits."""

    token_id: int
    logprob: float
    rank: int
    alternatives: tuple[tuple[int, float], ...]


UNSATISFIABLE = (
    "no token is left to choose: all are banned, not allowed, or stop too early",
    "penalties and biases make the row's numbers infinite",
)
"""Errors of rows whose requests contradict themselves: the client's, not the model's."""


class RowResult(NamedTuple):
    """What one item came to."""

    token_ids: tuple[int, ...] = ()
    """The tokens chosen: one where the item asked for sampling, none otherwise."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    error: str | None = None
    """Why this row failed. Others are not touched by it, and what it wrote is never named."""


class StepResult(NamedTuple):
    """What a step returned, row by row."""

    step: int
    rows: dict[int, RowResult]
    """Sequence id -> result, for exactly the items of the plan."""
