"""Detects an answer that repeats itself for ever. Pure.

An answer is a *loop* when its latest tokens have a period of 1 to MAX_PERIOD tokens, and at least `min_loop_tokens` of
them were the model's choice. Tokens that a grammar forces are compared like all others, but do not count: a text that
its grammar makes periodic is not the model's loop, and a loop between forced tokens still is.

Only one candidate for the period is followed, at one comparison per token. It is searched every SEARCH_TOKENS tokens,
as the smallest period of the latest MAX_PERIOD tokens and the period before them. That suffices: if two periods of at
most MAX_PERIOD hold for 2 x MAX_PERIOD tokens, their greatest common divisor is a period as well (Fine and Wilf), so
only the smallest matters, and every loop passes through a search before it is long enough to end the answer.
"""

MAX_PERIOD = 128
MIN_TOKENS = 256
"""Shortest loop in tokens, for any period; twice MAX_PERIOD."""
MIN_REPEATS = 8
"""Smallest number of repetitions of a long period."""
SEARCH_TOKENS = 64
"""Tokens between two searches; a loop has at most MAX_PERIOD + 3 x SEARCH_TOKENS tokens when its period is found."""
KEPT_TOKENS = 512
LOOP = "loop"
"""Finish reason of an answer that was ended as a loop."""


def min_loop_tokens(period: int) -> int:
    """Return the smallest number of chosen tokens of a loop with this period."""
    return max(MIN_TOKENS, MIN_REPEATS * period)


class LoopDetector:
    """The latest tokens of one answer."""

    __slots__ = ("_are_chosen", "_num_chosen", "_num_until_search", "_period", "_tokens")

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._are_chosen: list[bool] = []
        self._num_until_search = SEARCH_TOKENS
        self._period = 0
        """The candidate; 0: none."""
        self._num_chosen = 0
        """Chosen tokens in the longest end of the answer that has the candidate as its period."""

    def push(self, token_id: int, *, is_forced: bool) -> bool:
        """Add a token; return whether the answer now is a loop."""
        tokens, period = self._tokens, self._period
        tokens.append(token_id)
        self._are_chosen.append(not is_forced)
        self._num_until_search -= 1
        if period and token_id == tokens[-1 - period]:
            self._num_chosen += not is_forced
        else:
            self._period = 0
        if self._num_until_search == 0:
            self._num_until_search = SEARCH_TOKENS
            if not self._period:
                self._search()
            del tokens[:-KEPT_TOKENS], self._are_chosen[:-KEPT_TOKENS]
        return bool(self._period) and self._num_chosen >= min_loop_tokens(self._period)

    def _search(self) -> None:
        """Set the candidate, and count the chosen tokens for which it holds."""
        tokens, num_tokens = self._tokens, len(self._tokens)
        tail = tokens[-MAX_PERIOD:]
        for period in range(1, min(MAX_PERIOD, num_tokens - MAX_PERIOD) + 1):
            if tokens[-1 - period] == tail[-1] and tokens[-MAX_PERIOD - period : -period] == tail:
                first = num_tokens - MAX_PERIOD - period
                while first and tokens[first - 1] == tokens[first - 1 + period]:
                    first -= 1
                self._period, self._num_chosen = period, sum(self._are_chosen[first:])
                return
