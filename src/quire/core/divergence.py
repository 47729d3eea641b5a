"""How far a prompt is cached, and why no further: what the prefix tree returns and clients are shown. Pure."""

from dataclasses import dataclass
from enum import Enum

from quire.core.digests import Namespace


class MissReason(Enum):
    """Why the next token was not reused, in order of precedence."""

    COMPUTING = "computing"
    TOO_SHORT = "too_short"
    STATE_MISSING = "state_missing"
    """The blocks are there; the recurrent state behind the last of them is not."""
    EVICTED = "evicted"
    DIVERGED = "diverged"
    OTHER_NAMESPACE = "other_namespace"
    FIRST_SEEN = "first_seen"


@dataclass(frozen=True, slots=True)
class Divergence:
    """How many tokens of a prompt are cached, and why the next one is not."""

    num_cached_tokens: int
    reason: MissReason
    first_different_token: int | None = None
    """DIVERGED: position in the prompt of the first token that differs from the closest cached sibling."""
    sibling_token_ids: tuple[int, ...] = ()
    """DIVERGED: the tokens of that sibling, a whole block that begins at position `num_cached_tokens`."""
    evicted_s_ago: float | None = None
    """EVICTED: how long ago the block that would have been next was taken."""
    other_namespace: Namespace | None = None
    """OTHER_NAMESPACE: where the same tokens are cached."""
