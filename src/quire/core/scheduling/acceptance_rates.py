"""How likely a guess is right: measured by what came of a sequence's guesses before, the latest counting most.

Counted apart by where a guess came from: what followed four tokens is right far more often than what followed one.
"""

from typing import NamedTuple

FIRST_RIGHT, FIRST_TRIED = 1.0, 2.0
"""What is assumed of guesses before there were any."""
FADING = 0.8
"""How much each result counts after the next."""
FORGOTTEN_TOKENS = 32
"""After so many tokens without a guess the past is forgotten: what was no use may be by now."""


class Draft(NamedTuple):
    """Tokens that may follow those of a sequence."""

    token_ids: tuple[int, ...] = ()
    source: int = 0
    """Guesses of one source are about as often right."""


class AcceptanceRate(NamedTuple):
    """What came of a sequence's guesses of one source."""

    num_right: float = 0.0
    num_tried: float = 0.0
    num_tokens: int = 0
    """That the sequence had when the last was tried."""

    def likelihood(self, num_tokens: int) -> float:
        """That the next token guessed is right, in a sequence of so many tokens."""
        past = self if num_tokens - self.num_tokens <= FORGOTTEN_TOKENS else UNKNOWN
        return (FIRST_RIGHT + past.num_right) / (FIRST_TRIED + past.num_tried)

    def after(self, num_drafts: int, num_right: int, num_tokens: int) -> "AcceptanceRate":
        """One more guess came to this. Tokens behind a wrong one were not tried."""
        past = self if num_tokens - self.num_tokens <= FORGOTTEN_TOKENS else UNKNOWN
        num_tried = FADING * past.num_tried + min(num_right + 1, num_drafts)
        return AcceptanceRate(FADING * past.num_right + num_right, num_tried, num_tokens)


UNKNOWN = AcceptanceRate()
