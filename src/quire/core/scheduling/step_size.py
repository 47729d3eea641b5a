"""Decides how many prompt tokens a step feeds, so that its duration stays within a limit. Durations are predicted from
those of earlier steps:

    duration of a step  =  fixed cost  +  cost per token x tokens  +  cost per pair x attention pairs

The three costs are fitted to recent steps with prefill chunks by non-negative least squares, with exponentially
decaying weights. Outliers are clamped to a few times the prediction, so one disturbed step changes the costs a little,
and a lasting slowdown changes them within some steps. Callers pass in durations, so a replay gives the same sizes.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf, sqrt
from typing import NamedTuple

from quire.core.step import WorkItem

TARGET_FRACTION = 0.9
"""Steps are planned for this fraction of the time limit, because half of them take longer than predicted."""
DECAY = 0.9
"""Each step multiplies the weight of all earlier measurements by this."""
MAX_SLOWER, MAX_FASTER = 3.0, 4.0
"""A measured duration is clamped to at most 3 times the prediction, and to at least a quarter of it."""
PAIRS_PER_TOKEN = 8192
"""Initial assumption: attending to this many earlier tokens costs as much as the rest of the work on a token."""
MAX_GROWTH = 2
"""A step feeds at most this many times the tokens of the largest earlier step, because larger ones are unmeasured."""
ROUNDS = 8
"""Rounds of coordinate descent after each step; the next fit continues from the result."""


class TokenLoad(NamedTuple):
    """The load of a step: the quantities that determine its duration."""

    num_tokens: int
    num_pairs: float
    """Attention pairs: each fed token with every token before it."""

    @staticmethod
    def of(items: Iterable[WorkItem]) -> "TokenLoad":
        """Return the load of these work items."""
        num_tokens, num_pairs = 0, 0.0
        for item in items:
            num_item_tokens = len(item.token_ids)
            num_tokens += num_item_tokens
            num_pairs += num_item_tokens * (item.first_position + num_item_tokens / 2)
        return TokenLoad(num_tokens, num_pairs)


@dataclass(frozen=True, slots=True)
class CostModel:
    """Cost coefficients in seconds: per step, per token and per attention pair."""

    step_s: float = 0.0
    token_s: float = 0.0
    pair_s: float = 0.0

    def seconds(self, load: TokenLoad) -> float:
        """Return the predicted duration of a step with this load."""
        return self.step_s + self.token_s * load.num_tokens + self.pair_s * load.num_pairs

    def num_tokens(self, available_s: float, num_past: int) -> float:
        """Return the chunk size n that fits: n (token_s + pair_s (num_past + n / 2)) = available_s."""
        first_s = self.token_s + self.pair_s * num_past
        rate = first_s + sqrt(first_s * first_s + 2.0 * self.pair_s * max(0.0, available_s))
        return 2.0 * max(0.0, available_s) / rate if rate else inf


class ChunkBudget:
    """The budget of a step for prefill chunks. Its first chunk may always have one block, so that prompts progress."""

    def __init__(self, num_left: int, available_s: float, min_tokens: int, costs: CostModel) -> None:
        self._num_left, self._available_s, self._min_tokens, self._costs = num_left, available_s, min_tokens, costs

    def num_tokens(self, num_past: int) -> int:
        """Return the size limit of the next chunk, whose sequence has computed `num_past` tokens."""
        limit = self._costs.num_tokens(self._available_s, num_past)
        return self._num_left if limit >= self._num_left else min(self._num_left, max(self._min_tokens, int(limit)))

    def take(self, num_past: int, num_tokens: int) -> None:
        """Subtract a chunk from the budget."""
        self._num_left -= num_tokens
        self._available_s -= (
            self._costs.seconds(TokenLoad(num_tokens, num_tokens * (num_past + num_tokens / 2))) - self._costs.step_s
        )
        self._min_tokens = 0


class StepSizer:
    """Fits the costs to measured steps, and computes the budget of the next step."""

    def __init__(self, limit_s: float, block_size: int) -> None:
        """`limit_s`: target duration of a step; 0: no limit."""
        self._limit_s, self._block_size = limit_s, block_size
        self._max_fed = 0
        self._products = [[0.0] * 3 for _ in range(3)]
        self._targets = [0.0] * 3
        self.costs = CostModel()

    def chunk_budget(self, num_left: int, decoding: TokenLoad) -> ChunkBudget:
        """Return a budget of at most `num_left` prompt tokens for a step that also has the load `decoding`."""
        if not self._limit_s:
            return ChunkBudget(num_left, 0.0, 0, CostModel())  # all costs are 0, so time does not limit the chunks
        max_tokens = max(self._block_size, MAX_GROWTH * self._max_fed)
        available_s = TARGET_FRACTION * self._limit_s - self.costs.seconds(decoding)
        return ChunkBudget(min(num_left, max_tokens), available_s, self._block_size, self.costs)

    def learn(self, load: TokenLoad, duration_s: float) -> None:
        """Update the costs with the measured duration of a step."""
        if not self._limit_s:
            return
        self._max_fed = max(self._max_fed, load.num_tokens)
        if duration_s <= 0.0:
            return  # the clock did not advance, so this is no measurement
        expected_s = self.costs.seconds(load)
        if not expected_s:
            token_s = duration_s / (load.num_tokens + load.num_pairs / PAIRS_PER_TOKEN)
            self.costs = CostModel(0.0, token_s, token_s / PAIRS_PER_TOKEN)
            expected_s = duration_s
        duration_s = min(max(duration_s, expected_s / MAX_FASTER), expected_s * MAX_SLOWER)
        self._add((1.0, float(load.num_tokens), load.num_pairs), duration_s, 1.0 / (duration_s * expected_s))
        self._fit()

    def _add(self, parts: tuple[float, float, float], duration_s: float, weight: float) -> None:
        for row, part in zip(self._products, parts, strict=True):
            row[:] = [DECAY * old + weight * part * other for old, other in zip(row, parts, strict=True)]
        self._targets = [
            DECAY * old + weight * part * duration_s for old, part in zip(self._targets, parts, strict=True)
        ]

    def _fit(self) -> None:
        costs = [self.costs.step_s, self.costs.token_s, self.costs.pair_s]
        refine_costs(costs, self._products, self._targets, ROUNDS)
        self.costs = CostModel(*costs)


def refine_costs(
    costs: list[float], products: Sequence[Sequence[float]], targets: Sequence[float], num_rounds: int
) -> None:
    """Improve a non-negative least-squares fit of `costs` in place: coordinate descent on the normal equations."""
    for _ in range(num_rounds):
        for index, row in enumerate(products):
            if row[index] > 0.0:
                rest = sum(factor * cost for factor, cost in zip(row, costs, strict=True)) - row[index] * costs[index]
                costs[index] = max(0.0, (targets[index] - rest) / row[index])
