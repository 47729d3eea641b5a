"""Decide whether B differs from A. Pure statistics for paired measurements: interleaved rounds of two servers in one
run, or equal batches of one workload's requests on two simulated fleets.

    change     the Hodges-Lehmann estimate: the median of the pairwise means (Walsh averages) of log ratios
    low, high  its exact confidence interval (Wilcoxon signed-rank test): no normal distribution is assumed
    noise      scatter of single pairs: the scaled median absolute deviation

The verdict on a metric is faster or slower if the whole interval lies on one side of "no change" and the change is at
least the threshold: significant but tiny differences do not count. Otherwise the verdict is no difference."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import combinations_with_replacement
from math import exp, isfinite, log
from statistics import median
from typing import TypeGuard

MIN_PAIRS = 7
"""With fewer pairs, no exact interval exists at the significance level below."""
LEVEL = 0.02
"""Significance level (1 - confidence)."""
THRESHOLD = 0.05
"""Smallest change that counts: two starts of one build differ by up to 3%."""


class SpeedVerdict(StrEnum):
    """The outcome of a comparison; of several metrics together, the first one in this order. `NOT_COMPARABLE` is set by
    callers, if A and B were not measured under equal conditions."""

    NOT_COMPARABLE = "not comparable"
    SLOWER = "slower"
    FASTER = "faster"
    NO_DIFFERENCE = "no difference"


@dataclass(frozen=True, slots=True)
class Change:
    """The change from A to B of the metric named `figure`. Changes are fractions: 0.1 means 10% more."""

    figure: str
    a: float
    b: float
    """`a` and `b` are medians over the pairs."""
    change: float
    low: float
    high: float
    noise: float
    verdict: SpeedVerdict


def change_of(
    metric: str, direction: int, pairs: Sequence[tuple[object, object]], threshold: float = THRESHOLD
) -> Change | None:
    """Judge one metric from pairs (A, B); `direction` is 1 if more is better and -1 if less is better. Returns None
    unless there are pairs and all their values are finite and positive."""
    numbers = [(float(a), float(b)) for a, b in pairs if _is_positive(a) and _is_positive(b)]
    if len(numbers) < len(pairs) or not numbers:
        return None
    ratios = [log(b / a) for a, b in numbers]
    centre, low, high = interval(ratios)
    noise = 1.4826 * median([abs(ratio - median(ratios)) for ratio in ratios])
    change, verdict = exp(centre) - 1.0, SpeedVerdict.NO_DIFFERENCE
    if low * high > 0 and abs(change) >= threshold:
        verdict = SpeedVerdict.FASTER if (centre > 0) == (direction > 0) else SpeedVerdict.SLOWER
    a, b = (median(side) for side in zip(*numbers, strict=True))
    return Change(metric, a, b, change, exp(low) - 1.0, exp(high) - 1.0, exp(noise) - 1.0, verdict)


def change_rows(changes: Sequence[Change]) -> list[tuple[str, ...]]:
    """Return one table row per judged metric."""
    return [
        (
            change.figure,
            f"{change.a:,.2f}",
            f"{change.b:,.2f}",
            f"{change.change:+.1%}",
            f"{change.low:+.1%} to {change.high:+.1%}",
            f"{change.noise:.1%}",
            change.verdict.value,
        )
        for change in changes
    ]


def interval(values: Sequence[float], level: float = LEVEL) -> tuple[float, float, float]:
    """Return the Hodges-Lehmann estimate of the values' centre and both ends of its exact confidence interval."""
    means = sorted((a + b) / 2.0 for a, b in combinations_with_replacement(values, 2))
    num_cut = _num_means_to_cut(len(values), level)
    return median(means), means[num_cut], means[-1 - num_cut]


def _num_means_to_cut(num_values: int, level: float) -> int:
    """Return how many sorted means to cut off at each end, from the tail of the Wilcoxon signed-rank distribution."""
    # ways[s]: how many of the 2^n subsets of the ranks 1..n have the sum s.
    ways = [1]
    for rank in range(1, num_values + 1):
        next_ways = [0] * (len(ways) + rank)
        for total, count in enumerate(ways):
            next_ways[total] += count
            next_ways[total + rank] += count
        ways = next_ways
    tail, max_tail = 0, level / 2.0 * 2**num_values
    for total, count in enumerate(ways):
        tail += count
        if tail > max_tail:
            return max(0, total - 1)
    return 0


def _is_positive(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value) and value > 0
