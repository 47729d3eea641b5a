"""Acceptance rates of a sequence's draft tokens, as exponentially weighted averages of earlier results.

Each draft source has its own rate: tokens found after a 4-gram are accepted far more often than after a single token.
"""

from typing import NamedTuple

PRIOR_ACCEPTED, PRIOR_VERIFIED = 1.0, 2.0
"""Prior of the acceptance rate: one of two draft tokens accepted."""
DECAY = 0.8
"""Each result multiplies the weight of all earlier results by this."""
MAX_AGE_TOKENS = 32
"""After this many tokens without a draft, earlier results are dropped, so that a bad rate does not prevent drafts."""


class Draft(NamedTuple):
    """Draft tokens: a prediction of a sequence's next tokens."""

    token_ids: tuple[int, ...] = ()
    source: int = 0
    """How the draft was found, as a number (`ngrams.OTHER_REQUEST`). Each source has its own acceptance rate."""


class AcceptanceRate(NamedTuple):
    """The decayed counts of accepted and verified draft tokens of one sequence and source."""

    num_accepted: float = 0.0
    num_verified: float = 0.0
    num_tokens: int = 0
    """Length of the sequence when the last draft was verified."""

    def likelihood(self, num_tokens: int) -> float:
        """Return the probability that the next draft token is accepted; `num_tokens` is the sequence's length."""
        rate = self if num_tokens - self.num_tokens <= MAX_AGE_TOKENS else UNKNOWN
        return (PRIOR_ACCEPTED + rate.num_accepted) / (PRIOR_VERIFIED + rate.num_verified)

    def with_result(self, num_drafts: int, num_accepted: int, num_tokens: int) -> "AcceptanceRate":
        """Return the rate after one more draft. Draft tokens after a rejected one do not count as verified."""
        rate = self if num_tokens - self.num_tokens <= MAX_AGE_TOKENS else UNKNOWN
        num_verified = DECAY * rate.num_verified + min(num_accepted + 1, num_drafts)
        return AcceptanceRate(DECAY * rate.num_accepted + num_accepted, num_verified, num_tokens)


UNKNOWN = AcceptanceRate()
