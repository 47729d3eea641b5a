"""Ratios of speeds over interleaved rounds, with the interval that `quire bench` uses for two builds.

At first ten rounds run (seven if a round takes over a minute), then one more while an interval is wider than a fifth of
its median, up to thirty rounds or 90 minutes.
If the interval is still as wide, the median must be within the bound.
Otherwise the bound is broken if the whole interval lies beyond it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import exp, log
from time import monotonic

from quire.verdicts import interval

NUM_ROUNDS, NUM_LONG_ROUNDS, MAX_ROUNDS = 10, 7, 30
LONG_ROUND_S, MAX_S = 60.0, 90 * 60.0
MAX_WIDTH = 0.2
"""The width of an interval over its median, above which the interval does not decide."""


@dataclass(frozen=True, slots=True)
class RatioInterval:
    """The median of a ratio and its confidence interval."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, ratios: Sequence[float]) -> "RatioInterval":
        """Compute the interval from one ratio per round, all above 0."""
        centre, low, high = (exp(one) for one in interval([log(ratio) for ratio in ratios]))
        return cls(centre, low, high)

    @property
    def is_wide(self) -> bool:
        """Whether the interval is too wide to be judged by its ends."""
        return self.high - self.low > MAX_WIDTH * self.median

    def is_within(self, at_most: float | None, at_least: float | None) -> bool:
        """Whether the interval is not wholly beyond the bound; of a wide one, whether the median is within."""
        low, high = (self.median, self.median) if self.is_wide else (self.low, self.high)
        return (at_most is None or low <= at_most) and (at_least is None or high >= at_least)


def measured_ratios(
    measure: Callable[[], Sequence[float]], num_rounds: int | None = None, clock: Callable[[], float] = monotonic
) -> list[list[float]]:
    """Run as many rounds of `measure`, which returns one ratio per row, as the intervals need. Quick runs pass
    `num_rounds`, and their width is not checked."""
    start_s = clock()
    rows: list[list[float]] = []
    while True:
        for index, ratio in enumerate(measure()):
            if index == len(rows):
                rows.append([])
            rows[index].append(ratio)
        num_done, elapsed_s = len(rows[0]), clock() - start_s
        if num_rounds is not None:
            if num_done >= num_rounds:
                return rows
            continue
        needed = NUM_LONG_ROUNDS if elapsed_s / num_done > LONG_ROUND_S else NUM_ROUNDS
        if num_done < needed:
            continue
        if num_done >= MAX_ROUNDS or elapsed_s >= MAX_S or not any(RatioInterval.of(row).is_wide for row in rows):
            return rows
