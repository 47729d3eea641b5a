"""How many prompt tokens a step feeds, so that it lasts no longer than it may: from how long steps took.

    seconds of a step  =  its own  +  price x tokens fed  +  price x pairs of a token and one before it

Three prices of at least zero, fitted to the latest steps that fed prompts, the last of them counting most. A step that
took far longer or shorter than expected counts as a few times as long or short: a neighbour's burst on the machine, or
a pause of it, moves prices a little and a slower machine moves them within some steps. Seconds are handed in, so the
same seconds give the same sizes: that is what a replay relies on. No state but this, and no clock.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import inf, sqrt
from typing import NamedTuple

from quire.core.step import WorkItem

AIM = 0.9
"""Of the time a step may take, what is planned for: half of all steps take longer than expected."""
MEMORY = 0.9
"""What a step's weight is worth one step later."""
MOST_SLOWER, MOST_FASTER = 3.0, 4.0
"""Beyond so many times what was expected a step counts as that many times."""
PAIRS_OF_TOKEN = 8192
"""Before anything is known: a token behind so many costs twice a token behind none."""
GROWTH = 2
"""A step feeds at most so many times what the largest before it fed: what was not measured may cost anything."""
ROUNDS = 8
"""Of setting each price to its best value while the others stay; where they left off, the next step goes on."""


class Fed(NamedTuple):
    """What of a step costs time."""

    num_tokens: int
    num_pairs: float
    """Of each token with each before it."""

    @staticmethod
    def of(items: Iterable[WorkItem]) -> "Fed":
        """By a plan."""
        num_tokens, num_pairs = 0, 0.0
        for item in items:
            num_own = len(item.token_ids)
            num_tokens += num_own
            num_pairs += num_own * (item.first_position + num_own / 2)
        return Fed(num_tokens, num_pairs)


@dataclass(frozen=True, slots=True)
class Prices:
    """Seconds."""

    step_s: float = 0.0
    token_s: float = 0.0
    pair_s: float = 0.0

    def seconds(self, fed: Fed) -> float:
        """Of a step."""
        return self.step_s + self.token_s * fed.num_tokens + self.pair_s * fed.num_pairs

    def num_tokens(self, left_s: float, past: int) -> float:
        """How many tokens behind `past` others take this long: n (token + pair (past + n / 2)) = left."""
        first_s = self.token_s + self.pair_s * past
        rate = first_s + sqrt(first_s * first_s + 2.0 * self.pair_s * max(0.0, left_s))
        return 2.0 * max(0.0, left_s) / rate if rate else inf


class StepRoom:
    """What a step may still feed of prompts. The first chunk is a block at least, or a prompt would never be read."""

    __slots__ = ("_least", "_left_s", "_num_left", "_prices")

    def __init__(self, num_left: int, left_s: float, least: int, prices: Prices) -> None:
        self._num_left, self._left_s, self._least, self._prices = num_left, left_s, least, prices

    def num_tokens(self, past: int) -> int:
        """For one more chunk behind so many tokens of its sequence."""
        affordable = self._prices.num_tokens(self._left_s, past)
        return (
            self._num_left if affordable >= self._num_left else min(self._num_left, max(self._least, int(affordable)))
        )

    def take(self, past: int, num_tokens: int) -> None:
        """A chunk is fed."""
        self._num_left -= num_tokens
        self._left_s -= (
            self._prices.seconds(Fed(num_tokens, num_tokens * (past + num_tokens / 2))) - self._prices.step_s
        )
        self._least = 0


class StepSizer:
    """Learns from steps, and computes what the next one has room for."""

    __slots__ = ("_block_size", "_limit_s", "_most_fed", "_products", "_wanted", "prices")

    def __init__(self, limit_s: float, block_size: int) -> None:
        """`limit_s`: how long a step may take; 0: as long as its tokens take."""
        self._limit_s, self._block_size = limit_s, block_size
        self._most_fed = 0
        self._products = [[0.0] * 3 for _ in range(3)]
        self._wanted = [0.0] * 3
        self.prices = Prices()

    def room(self, num_left: int, decoding: Fed) -> StepRoom:
        """Of a step that feeds at most so many tokens beside `decoding`."""
        if not self._limit_s:
            return StepRoom(num_left, 0.0, 0, Prices())  # where nothing costs anything, no time is enough
        most = max(self._block_size, GROWTH * self._most_fed)
        left_s = AIM * self._limit_s - self.prices.seconds(decoding)
        return StepRoom(min(num_left, most), left_s, self._block_size, self.prices)

    def learn(self, fed: Fed, took_s: float) -> None:
        """A step that fed this took so long."""
        if not self._limit_s:
            return
        self._most_fed = max(self._most_fed, fed.num_tokens)
        if took_s <= 0.0:
            return  # a clock that stood still or went back measures nothing
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
        for _ in range(ROUNDS):
            for at, row in enumerate(self._products):
                if row[at] > 0.0:
                    others = sum(one * price for one, price in zip(row, found, strict=True)) - row[at] * found[at]
                    found[at] = max(0.0, (self._wanted[at] - others) / row[at])
        self.prices = Prices(*found)
