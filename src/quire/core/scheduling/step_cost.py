"""The cost model of a step: its duration by number of tokens, and the acceptance probability at which a draft pays off.

A step reads the weights once for all its tokens, so the first few tokens cost little more than one. From some number
on, which depends on machine, model and weight format, each token adds its full cost. T is measured at model load.

    n sequences, r tokens fed                          throughput n / T(r)
    plus a draft token with acceptance probability q   (n + q) / T(r + 1), higher if q > n (T(r + 1) - T(r)) / T(r)
"""

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass

from quire.errors import ConfigError

MARGIN = 1.25
"""Safety factor on the required probability, for measurement errors and the time of sampling."""
LEAST_PRICE = 0.01
"""Lower bound of the relative cost of one more token, in case the measured cost is smaller."""


@dataclass(frozen=True, slots=True)
class StepCost:
    """The duration of a step as a function of the number of tokens it feeds."""

    points: tuple[tuple[int, float], ...]
    """(tokens, seconds), both rising; linear interpolation between points, and extrapolation after the last."""

    def __post_init__(self) -> None:
        pairs = list(zip(self.points, self.points[1:], strict=False))
        is_rising = all(low[0] < high[0] and low[1] <= high[1] for low, high in pairs)
        if not pairs or not is_rising or self.points[0][0] < 1 or self.points[0][1] <= 0.0:
            raise ConfigError(
                f"expected two points or more for the cost of a step, tokens and seconds rising, got {self.points}"
            )

    @staticmethod
    def measured(points: Iterable[tuple[int, float]]) -> "StepCost":
        """Make a cost model from measurements in any order; durations are raised where needed to never decrease."""
        rising: list[tuple[int, float]] = []
        for num_tokens, seconds in sorted(points):
            rising.append((num_tokens, max(seconds, rising[-1][1] if rising else 0.0)))
        return StepCost(tuple(rising))

    def seconds(self, num_tokens: int) -> float:
        """Return the duration of a step that feeds this many tokens."""
        low, low_s, slope = self._line(num_tokens)
        return low_s + slope * max(0, num_tokens - low)

    def least_likelihood(self, num_tokens: int, num_sequences: int) -> float:
        """Return the least acceptance probability at which one more draft token pays off in such a step."""
        _, _, slope = self._line(num_tokens)
        return MARGIN * num_sequences * max(slope / self.seconds(num_tokens), LEAST_PRICE)

    def _line(self, num_tokens: int) -> tuple[int, float, float]:
        """Return start (tokens, seconds) and slope of the line segment for this many tokens."""
        points = self.points
        at = min(max(bisect_right(points, (num_tokens, float("inf"))), 1), len(points) - 1)
        (low, low_s), (high, high_s) = points[at - 1], points[at]
        return low, low_s, (high_s - low_s) / (high - low)
