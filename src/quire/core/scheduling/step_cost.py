"""The cost model of a step: its duration by number of tokens, and the acceptance probability at which a draft pays off.

A step reads the weights once for all its tokens, so the first few tokens cost little more than one. From some number
on, which depends on machine, model and weight format, each token adds its full cost. T(r) is measured at load.

    n sequences, a step of r tokens in T(r) seconds    throughput n / T(r)
    plus a draft token with acceptance probability q   (n + q) / T(r + 1), higher if q > n (T(r + 1) - T(r)) / T(r)
"""

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass

from quire.errors import ConfigError

MARGIN = 1.25
"""Safety factor on the required probability, for measurement errors and the time of sampling."""
MIN_RELATIVE_COST = 0.01
"""Lower bound of the relative cost of one more token, in case the measured cost is smaller."""


@dataclass(frozen=True, slots=True)
class StepCost:
    """The duration of a step as a function of the number of tokens it feeds."""

    points: tuple[tuple[int, float], ...]
    """(tokens, seconds), both rising; linear interpolation between points, and extrapolation after the last."""

    def __post_init__(self) -> None:
        pairs = list(zip(self.points, self.points[1:], strict=False))
        is_rising = all(a[0] < b[0] and a[1] <= b[1] for a, b in pairs)
        if not pairs or not is_rising or self.points[0][0] < 1 or self.points[0][1] <= 0.0:
            raise ConfigError(
                f"expected at least two (tokens, seconds) points of the cost of a step, both rising, got {self.points}"
            )

    @staticmethod
    def from_measurements(points: Iterable[tuple[int, float]]) -> "StepCost":
        """Make a cost model from points in any order; seconds are raised where needed, so that they never decrease."""
        rising_points: list[tuple[int, float]] = []
        for num_tokens, seconds in sorted(points):
            rising_points.append((num_tokens, max(seconds, rising_points[-1][1] if rising_points else 0.0)))
        return StepCost(tuple(rising_points))

    def seconds(self, num_tokens: int) -> float:
        """Return the duration of a step that feeds this many tokens."""
        start, start_s, slope = self._segment(num_tokens)
        return start_s + slope * max(0, num_tokens - start)

    def min_acceptance(self, num_tokens: int, num_sequences: int) -> float:
        """Return the lowest acceptance probability at which one more draft token pays off in such a step."""
        _, _, slope = self._segment(num_tokens)
        return MARGIN * num_sequences * max(slope / self.seconds(num_tokens), MIN_RELATIVE_COST)

    def _segment(self, num_tokens: int) -> tuple[int, float, float]:
        """Return the start (tokens, seconds) and the slope of the line segment that contains this many tokens."""
        points = self.points
        index = min(max(bisect_right(points, (num_tokens, float("inf"))), 1), len(points) - 1)
        (start, start_s), (end, end_s) = points[index - 1], points[index]
        return start, start_s, (end_s - start_s) / (end - start)
