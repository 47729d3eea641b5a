"""Is B different from A? Pure statistics for figures that come in pairs: rounds of two servers taken interleaved in one
run, or parts of one load that two simulated fleets were given.

    change   the Hodges-Lehmann estimate: the median of all means of two log ratios
    between  its exact confidence interval (Wilcoxon's signed ranks): no bell curve is assumed
    noise    how much single pairs scatter about it (scaled median deviation)

A figure is faster or slower if the whole interval lies on one side of "no change" and the change is at least the
threshold; small differences that are surely there are not worth a red light. Anything else is no difference.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import combinations_with_replacement
from math import exp, isfinite, log
from statistics import median
from typing import TypeGuard

MIN_PAIRS = 7
"""With fewer the interval cannot be exact at the level below."""
LEVEL = 0.02
"""How often a figure of equal servers may fall outside its interval."""
THRESHOLD = 0.05
"""Less is not told from no difference: two starts of one build differ by up to 3%."""


class SpeedVerdict(StrEnum):
    """What a comparison comes to. Of several figures the one named first here decides."""

    NOT_COMPARABLE = "not comparable"
    SLOWER = "slower"
    FASTER = "faster"
    NO_DIFFERENCE = "no difference"


@dataclass(frozen=True, slots=True)
class Change:
    """How one figure of B stands to that of A. Changes are shares: 0.1 is a tenth more."""

    figure: str
    a: float
    b: float
    """Medians over the pairs."""
    change: float
    low: float
    high: float
    noise: float
    verdict: SpeedVerdict


def change_of(
    figure: str, direction: int, pairs: Sequence[tuple[object, object]], threshold: float = THRESHOLD
) -> Change | None:
    """How one figure stands, of pairs (A, B); `direction` is 1 where more is better and -1 where less is. None if it
    was not measured in every pair."""
    known = [(float(one), float(other)) for one, other in pairs if _is_positive(one) and _is_positive(other)]
    if len(known) < len(pairs) or not known:
        return None
    ratios = [log(other / one) for one, other in known]
    centre, low, high = interval(ratios)
    noise = 1.4826 * median([abs(ratio - median(ratios)) for ratio in ratios])
    share, verdict = exp(centre) - 1.0, SpeedVerdict.NO_DIFFERENCE
    if low * high > 0 and abs(share) >= threshold:
        verdict = SpeedVerdict.FASTER if (centre > 0) == (direction > 0) else SpeedVerdict.SLOWER
    a, b = (median(side) for side in zip(*known, strict=True))
    return Change(figure, a, b, share, exp(low) - 1.0, exp(high) - 1.0, exp(noise) - 1.0, verdict)


def change_rows(changes: Sequence[Change]) -> list[tuple[str, ...]]:
    """For a table: one row for each figure that was judged."""
    return [
        (
            one.figure,
            f"{one.a:,.2f}",
            f"{one.b:,.2f}",
            f"{one.change:+.1%}",
            f"{one.low:+.1%} to {one.high:+.1%}",
            f"{one.noise:.1%}",
            one.verdict.value,
        )
        for one in changes
    ]


def interval(values: Sequence[float], level: float = LEVEL) -> tuple[float, float, float]:
    """The Hodges-Lehmann estimate of their centre, and the ends of its exact interval."""
    means = sorted((one + other) / 2.0 for one, other in combinations_with_replacement(values, 2))
    outside = _ranks_outside(len(values), level)
    return median(means), means[outside], means[-1 - outside]


def _ranks_outside(num_values: int, level: float) -> int:
    """How many of the sorted means may be left out at each end: the tail of Wilcoxon's signed rank sum."""
    # Of all 2^n ways to sign the ranks 1..n: how many give each sum.
    ways = [1]
    for rank in range(1, num_values + 1):
        longer = [0] * (len(ways) + rank)
        for total, count in enumerate(ways):
            longer[total] += count
            longer[total + rank] += count
        ways = longer
    tail, allowed = 0, level / 2.0 * 2**num_values
    for total, count in enumerate(ways):
        tail += count
        if tail > allowed:
            return max(0, total - 1)
    return 0


def _is_positive(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value) and value > 0
