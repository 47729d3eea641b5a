"""The result of a cache lookup: how many tokens of a prompt are cached, and the reason for the first miss."""

from dataclasses import dataclass
from enum import Enum

from quire.core.digests import Namespace


class MissReason(Enum):
    """The reason for a cache miss. If several apply, the first in this list is reported."""

    COMPUTING = "computing"  # by the step in flight, or by a running sequence
    TOO_SHORT = "too_short"  # less than one block is left, beside the last token
    STATE_MISSING = "state_missing"
    """The blocks are cached, but the recurrent state after the last of them is not."""
    EVICTED = "evicted"
    DIVERGED = "diverged"
    OTHER_NAMESPACE = "other_namespace"
    FIRST_SEEN = "first_seen"  # as far as is remembered


@dataclass(frozen=True, slots=True)
class Divergence:
    """The number of cached tokens of a prompt, and the reason why the next token is not cached."""

    num_cached_tokens: int
    reason: MissReason
    first_different_token: int | None = None
    """DIVERGED: position in the prompt of the first token that differs from the most similar cached sibling block."""
    sibling_token_ids: tuple[int, ...] = ()
    """DIVERGED: the tokens of that sibling block, which starts at position `num_cached_tokens`."""
    evicted_s_ago: float | None = None
    """EVICTED: seconds since the next block was evicted."""
    other_namespace: Namespace | None = None
    """OTHER_NAMESPACE: the namespace in which the same tokens are cached."""
