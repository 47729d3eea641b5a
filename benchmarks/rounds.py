"""Ratios of speeds over interleaved rounds, with the interval that `quire bench` uses for two builds.

ten rounds (seven where a round lasts over a minute)
while the interval is wider than a fifth of its median: one more, up to thirty rounds or 90 minutes
still as wide: the median itself must hold the bound
otherwise the bound is broken when the whole interval lies beyond it
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import exp, log
from time import monotonic

from quire.verdicts import interval

NUM_ROUNDS, NUM_LONG_ROUNDS, MAX_ROUNDS = 10, 7, 30
LONG_ROUND_S, MAX_S = 60.0, 90 * 60.0
MAX_WIDTH = 0.2
"""Of an interval, over its median."""


@dataclass(frozen=True, slots=True)
class RatioInterval:
    """Where a ratio lies."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, ratios: Sequence[float]) -> "RatioInterval":
        """Of one ratio for each round, all above 0."""
        centre, low, high = (exp(one) for one in interval([log(ratio) for ratio in ratios]))
        return cls(centre, low, high)

    @property
    def is_wide(self) -> bool:
        """It says too little to be judged by its ends."""
        return self.high - self.low > MAX_WIDTH * self.median

    def is_within(self, at_most: float | None, at_least: float | None) -> bool:
        """It is not wholly beyond the bound; where it is wide, its median is not."""
        low, high = (self.median, self.median) if self.is_wide else (self.low, self.high)
        return (at_most is None or low <= at_most) and (at_least is None or high >= at_least)


def measured_ratios(
    measure: Callable[[], Sequence[float]], num_rounds: int | None = None, clock: Callable[[], float] = monotonic
) -> list[list[float]]:
    """Rounds of `measure`, which returns one ratio for each row; as many as their intervals need. `num_rounds` is for
    quick runs, which say nothing about width."""
    started_s = clock()
    rows: list[list[float]] = []
    while True:
        for at, ratio in enumerate(measure()):
            if at == len(rows):
                rows.append([])
            rows[at].append(ratio)
        num_done, taken_s = len(rows[0]), clock() - started_s
        if num_rounds is not None:
            if num_done >= num_rounds:
                return rows
            continue
        needed = NUM_LONG_ROUNDS if taken_s / num_done > LONG_ROUND_S else NUM_ROUNDS
        if num_done < needed:
            continue
        if num_done >= MAX_ROUNDS or taken_s >= MAX_S or not any(RatioInterval.of(row).is_wide for row in rows):
            return rows
