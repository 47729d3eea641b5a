"""Acceptance rates of a sequence's draft tokens, as exponentially weighted averages of earlier results.

Rates are kept per source of a draft: tokens that followed a 4-gram are accepted far more often than after one token.
"""

from typing import NamedTuple

FIRST_RIGHT, FIRST_TRIED = 1.0, 2.0
"""Prior of the acceptance rate: one of two draft tokens accepted."""
FADING = 0.8
"""Decay of a result's weight per later result."""
FORGOTTEN_TOKENS = 32
"""After this many tokens without a draft, earlier results are dropped, so that a bad rate does not prevent drafts."""


class Draft(NamedTuple):
    """Draft tokens: a prediction of a sequence's next tokens."""

    token_ids: tuple[int, ...] = ()
    source: int = 0
    """How the draft was found. Drafts of one source have a common acceptance rate."""


class AcceptanceRate(NamedTuple):
    """The decayed counts of accepted and verified draft tokens of one sequence and source."""

    num_right: float = 0.0
    num_tried: float = 0.0
    num_tokens: int = 0
    """Length of the sequence when the last draft was verified."""

    def likelihood(self, num_tokens: int) -> float:
        """Return the probability that the next draft token is accepted; `num_tokens` is the sequence's length."""
        past = self if num_tokens - self.num_tokens <= FORGOTTEN_TOKENS else UNKNOWN
        return (FIRST_RIGHT + past.num_right) / (FIRST_TRIED + past.num_tried)

    def after(self, num_drafts: int, num_right: int, num_tokens: int) -> "AcceptanceRate":
        """Return the rate updated with the result of one draft. Tokens after a rejected one count as not verified."""
        past = self if num_tokens - self.num_tokens <= FORGOTTEN_TOKENS else UNKNOWN
        num_tried = FADING * past.num_tried + min(num_right + 1, num_drafts)
        return AcceptanceRate(FADING * past.num_right + num_right, num_tried, num_tokens)


UNKNOWN = AcceptanceRate()
