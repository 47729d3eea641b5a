"""What happened, as plain frozen messages. The core emits them; streams, observers and publishers read them.

A request's events are, in order: `Admitted`, then for each continuation `Token`s (perhaps `Preempted` between) and one
`SequenceFinished`, and last of all exactly one `Finished`. One that ends in the queue has only the last two kinds.

The KV events carry everything the field's wire format asks for (block hashes in chain order, the parent, the
tokens, the block size, and the adapter and cache group that entered the hash). A block's `BlockStored` always
comes before those of its children and before its own `BlockRemoved`.
"""

from dataclasses import dataclass
from typing import NamedTuple

from quire.core.prefix_tree import Divergence
from quire.core.request import FinishReason
from quire.core.step import TokenLogprobs


@dataclass(frozen=True, slots=True)
class BlockStored:
    """A run of full blocks became hittable, each under the one before it."""

    digests: tuple[bytes, ...]
    parent_digest: bytes | None
    """The block before the first of this run; None when the run begins a prompt."""
    token_ids: tuple[int, ...]
    block_size: int
    adapter: str
    cache_group: str
    """Must be announced: else a router counts one tenant's blocks as hits for another."""


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """These blocks can no longer be hit. Leaves come before their parents."""

    digests: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """No block can be hit any more."""


KVEvent = BlockStored | BlockRemoved | AllBlocksCleared


class Admitted(NamedTuple):
    """A request began to run for the first time."""

    request_id: str
    at_s: float
    wait_s: float
    num_cached_tokens: int
    miss: Divergence | None = None
    """Why the next token was not found in the cache at this moment, where the request wants to know."""


class Token(NamedTuple):
    """One more token of one continuation."""

    request_id: str
    sequence_index: int
    at_s: float
    token_id: int
    num_output_tokens: int
    """Counted from the client's prompt, this token included: 1 is the first token."""
    logprobs: TokenLogprobs | None


class PromptLogprobs(NamedTuple):
    """Log-probabilities of a run of prompt tokens, in order; the prompt's first token has none."""

    request_id: str
    first_position: int
    logprobs: tuple[TokenLogprobs, ...]


class Preempted(NamedTuple):
    """A sequence gave up its place; it comes back with what it knows."""

    request_id: str
    sequence_index: int
    at_s: float


class SequenceFinished(NamedTuple):
    """One continuation ended."""

    request_id: str
    sequence_index: int
    at_s: float
    reason: FinishReason
    num_output_tokens: int
    error: str | None
    retry_after_s: int | None = None
    """When to ask again, of one that was displaced."""


class Finished(NamedTuple):
    """The request ended: the last event of its id, and the only one of this kind."""

    request_id: str
    at_s: float
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int


class Replayed(NamedTuple):
    """The worker that ran it is gone and another goes on with it. Told by whoever replaces workers, not by the core."""

    request_id: str
    at_s: float


RequestEvent = Admitted | Token | PromptLogprobs | Preempted | Replayed | SequenceFinished | Finished
Event = KVEvent | RequestEvent
