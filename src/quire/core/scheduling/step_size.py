"""Decide how many prompt tokens a step takes so that it meets its time limit, predicted from the durations of earlier
steps.

    duration of a step  =  fixed cost  +  cost per token x tokens  +  cost per pair x attention pairs

The three costs are fitted to recent steps with prefill chunks by non-negative least squares, with exponentially
decaying weights. Outliers are clamped to a few times the prediction: a burst of another process changes the costs a
little, a slower machine changes them within some steps. Callers pass in durations, so a replay gives the same sizes.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf, sqrt
from typing import NamedTuple

from quire.core.step import WorkItem

AIM = 0.9
"""Fraction of the time limit to plan for, because half of all steps take longer than predicted."""
MEMORY = 0.9
"""Decay of a measurement's weight per step."""
MOST_SLOWER, MOST_FASTER = 3.0, 4.0
"""Measured durations are clamped to within these factors of the prediction."""
PAIRS_OF_TOKEN = 8192
"""Initial assumption: attending to this many earlier tokens costs as much as the rest of the work on a token."""
GROWTH = 2
"""A step feeds at most this many times the tokens of the largest earlier step: larger sizes are not measured yet."""
ROUNDS = 8
"""Rounds of coordinate descent per step; the fit of the next step starts from the result."""


class Fed(NamedTuple):
    """The load of a step: the amounts that determine its duration."""

    num_tokens: int
    num_pairs: float
    """Attention pairs: each token with every earlier one."""

    @staticmethod
    def of(items: Iterable[WorkItem]) -> "Fed":
        """Return the load of these work items."""
        num_tokens, num_pairs = 0, 0.0
        for item in items:
            num_own = len(item.token_ids)
            num_tokens += num_own
            num_pairs += num_own * (item.first_position + num_own / 2)
        return Fed(num_tokens, num_pairs)


@dataclass(frozen=True, slots=True)
class Prices:
    """Cost coefficients in seconds: per step, per token and per attention pair."""

    step_s: float = 0.0
    token_s: float = 0.0
    pair_s: float = 0.0

    def seconds(self, fed: Fed) -> float:
        """Return the predicted duration of a step."""
        return self.step_s + self.token_s * fed.num_tokens + self.pair_s * fed.num_pairs

    def num_tokens(self, left_s: float, past: int) -> float:
        """Solve n (token_s + pair_s (past + n / 2)) = left_s for n: the chunk size after `past` tokens that fits."""
        first_s = self.token_s + self.pair_s * past
        rate = first_s + sqrt(first_s * first_s + 2.0 * self.pair_s * max(0.0, left_s))
        return 2.0 * max(0.0, left_s) / rate if rate else inf


class StepRoom:
    """The budget of a step for prefill chunks. At least one block always fits, so that prompts make progress."""

    def __init__(self, num_left: int, left_s: float, least: int, prices: Prices) -> None:
        self._num_left, self._left_s, self._least, self._prices = num_left, left_s, least, prices

    def num_tokens(self, past: int) -> int:
        """Return the size limit of the next chunk, whose sequence has computed `past` tokens."""
        affordable = self._prices.num_tokens(self._left_s, past)
        return (
            self._num_left if affordable >= self._num_left else min(self._num_left, max(self._least, int(affordable)))
        )

    def take(self, past: int, num_tokens: int) -> None:
        """Subtract a chunk from the budget."""
        self._num_left -= num_tokens
        self._left_s -= (
            self._prices.seconds(Fed(num_tokens, num_tokens * (past + num_tokens / 2))) - self._prices.step_s
        )
        self._least = 0


class StepSizer:
    """Fits the costs to measured steps, and computes the budget of the next step."""

    def __init__(self, limit_s: float, block_size: int) -> None:
        """`limit_s`: target duration of a step; 0: no limit."""
        self._limit_s, self._block_size = limit_s, block_size
        self._most_fed = 0
        self._products = [[0.0] * 3 for _ in range(3)]
        self._wanted = [0.0] * 3
        self.prices = Prices()

    def room(self, num_left: int, decoding: Fed) -> StepRoom:
        """Return the budget for at most `num_left` prompt tokens in a step that also feeds `decoding`."""
        if not self._limit_s:
            return StepRoom(num_left, 0.0, 0, Prices())  # all costs are 0, so time does not limit the chunks
        most = max(self._block_size, GROWTH * self._most_fed)
        left_s = AIM * self._limit_s - self.prices.seconds(decoding)
        return StepRoom(min(num_left, most), left_s, self._block_size, self.prices)

    def learn(self, fed: Fed, took_s: float) -> None:
        """Update the costs with the measured duration of a step."""
        if not self._limit_s:
            return
        self._most_fed = max(self._most_fed, fed.num_tokens)
        if took_s <= 0.0:
            return  # the clock stood still or went back: not a measurement
        expected_s = self.prices.seconds(fed)
        if not expected_s:
            token_s = took_s / (fed.num_tokens + fed.num_pairs / PAIRS_OF_TOKEN)
            self.prices = Prices(0.0, token_s, token_s / PAIRS_OF_TOKEN)
            expected_s = took_s
        took_s = min(max(took_s, expected_s / MOST_FASTER), expected_s * MOST_SLOWER)
        self._add((1.0, float(fed.num_tokens), fed.num_pairs), took_s, 1.0 / (took_s * expected_s))
        self._fit()

    def _add(self, parts: tuple[float, float, float], took_s: float, weight: float) -> None:
        for row, one in zip(self._products, parts, strict=True):
            row[:] = [MEMORY * known + weight * one * other for known, other in zip(row, parts, strict=True)]
        self._wanted = [MEMORY * known + weight * one * took_s for known, one in zip(self._wanted, parts, strict=True)]

    def _fit(self) -> None:
        found = [self.prices.step_s, self.prices.token_s, self.prices.pair_s]
        refine_costs(found, self._products, self._wanted, ROUNDS)
        self.prices = Prices(*found)


def refine_costs(
    costs: list[float], products: Sequence[Sequence[float]], wanted: Sequence[float], num_rounds: int
) -> None:
    """Improve a non-negative least-squares fit in place by coordinate descent, from its normal equations."""
    for _ in range(num_rounds):
        for at, row in enumerate(products):
            if row[at] > 0.0:
                others = sum(one * cost for one, cost in zip(row, costs, strict=True)) - row[at] * costs[at]
                costs[at] = max(0.0, (wanted[at] - others) / row[at])
