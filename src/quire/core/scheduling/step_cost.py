"""How long a step takes by the tokens it feeds, and how likely one more token must be to pay for itself.

Memory is read once for all tokens of a step, so the first few cost little more than one; from some number on, which
depends on machine, model and format, each costs its full share. It is measured where the model is loaded.

    n sequences, r tokens fed           n / T(r)       tokens a second
    and a guess with a chance of q      (n + q) / T(r + 1), which is more if q > n (T(r + 1) - T(r)) / T(r)
"""

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass

from quire.errors import ConfigError

MARGIN = 1.25
"""How much likelier than its price a guess must be: what was measured is not exact, and choosing takes time too."""
LEAST_PRICE = 0.01
"""Of a token, as a share of the step: a measurement below it is taken as this."""


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds of steps that feed so many tokens."""

    points: tuple[tuple[int, float], ...]
    """Tokens and seconds, both rising. Between two points on a line; beyond the last along the last line."""

    def __post_init__(self) -> None:
        pairs = list(zip(self.points, self.points[1:], strict=False))
        is_rising = all(low[0] < high[0] and low[1] <= high[1] for low, high in pairs)
        if not pairs or not is_rising or self.points[0][0] < 1 or self.points[0][1] <= 0.0:
            raise ConfigError(
                f"expected two points or more for the cost of a step, tokens and seconds rising, got {self.points}"
            )

    @staticmethod
    def measured(points: Iterable[tuple[int, float]]) -> "StepCost":
        """Of measurements in any order; a larger step that seemed shorter is taken to be as long as the smaller one."""
        rising: list[tuple[int, float]] = []
        for num_tokens, seconds in sorted(points):
            rising.append((num_tokens, max(seconds, rising[-1][1] if rising else 0.0)))
        return StepCost(tuple(rising))

    def seconds(self, num_tokens: int) -> float:
        """Of a step that feeds so many."""
        low, low_s, slope = self._line(num_tokens)
        return low_s + slope * max(0, num_tokens - low)

    def least_likelihood(self, num_tokens: int, num_sequences: int) -> float:
        """What the chance of one more guess must be in a step of so many tokens for so many sequences."""
        _, _, slope = self._line(num_tokens)
        return MARGIN * num_sequences * max(slope / self.seconds(num_tokens), LEAST_PRICE)

    def _line(self, num_tokens: int) -> tuple[int, float, float]:
        """Where the line begins on which a step of so many tokens lies, and its slope."""
        points = self.points
        at = min(max(bisect_right(points, (num_tokens, float("inf"))), 1), len(points) - 1)
        (low, low_s), (high, high_s) = points[at - 1], points[at]
        return low, low_s, (high_s - low_s) / (high - low)
