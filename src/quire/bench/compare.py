"""Is B different from A? Pure statistics for pairs of rounds that were taken interleaved in one run.

Two servers measured one after the other on a shared machine differ by whatever the machine did meanwhile. Rounds taken
interleaved share the weather, so each round gives one ratio B/A, and the question is whether those ratios are one.

    change   the Hodges-Lehmann estimate: the median of all means of two log ratios
    between  its exact confidence interval (Wilcoxon's signed ranks): no bell curve is assumed
    noise    how much single rounds scatter about it (scaled median deviation)

A figure is faster or slower if the whole interval lies on one side of "no change" and the change is at least the
threshold; small differences that are surely there are not worth a red light. Anything else is no difference.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import combinations_with_replacement
from math import exp, isfinite, log
from statistics import median
from typing import Any

MIN_PAIRS = 7
"""With fewer the interval cannot be exact at the level below."""
LEVEL = 0.02
"""How often a figure of equal servers may fall outside its interval."""
THRESHOLD = 0.05
"""Less is not told from no difference: two starts of one build differ by up to 3%."""
HEADLINES = {"output_throughput": 1, "median_ttft_ms": -1, "median_tpot_ms": -1}
"""Figures that are judged; whether more is better."""


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
    """Medians over the rounds."""
    change: float
    low: float
    high: float
    noise: float
    verdict: SpeedVerdict


@dataclass(frozen=True, slots=True)
class Comparison:
    """The verdict, what it rests on, and why there is none if there is none."""

    verdict: SpeedVerdict
    changes: tuple[Change, ...] = ()
    reason: str = ""
    num_pairs: int = 0


def compare_records(a: Mapping[str, Any], b: Mapping[str, Any], threshold: float = THRESHOLD) -> Comparison:
    """Two records as `quire bench ab` writes them."""
    reason = why_not(a, b)
    if reason:
        return Comparison(SpeedVerdict.NOT_COMPARABLE, reason=reason)
    rounds_a, rounds_b = a["rounds"], b["rounds"]
    changes = [
        changed
        for figure, direction in HEADLINES.items()
        if (changed := _figure(figure, direction, rounds_a, rounds_b, threshold)) is not None
    ]
    if not changes:
        return Comparison(SpeedVerdict.NOT_COMPARABLE, reason="no figure was measured in every round of both")
    worst = next(kind for kind in SpeedVerdict if any(one.verdict == kind for one in changes))
    return Comparison(worst, tuple(changes), num_pairs=len(rounds_a))


def why_not(a: Mapping[str, Any], b: Mapping[str, Any]) -> str:
    """Why two records cannot be compared; empty if they can."""
    for name, record in (("A", a), ("B", b)):
        if not isinstance(record.get("rounds"), list) or not record.get("run_id"):
            return f"{name} is not one side of a run of `quire bench ab`; only rounds taken interleaved can be compared"
    for what, key in (("run", "run_id"), ("machine", "machine"), ("load", "load")):
        if a.get(key) != b.get(key):
            return f"A and B are not of one {what}; measure both in one run: quire bench ab --a URL --b URL"
    if len(a["rounds"]) != len(b["rounds"]):
        return f"A has {len(a['rounds'])} rounds and B {len(b['rounds'])}; a run was cut short"
    if len(a["rounds"]) < MIN_PAIRS:
        return f"a verdict needs at least {MIN_PAIRS} rounds, {len(a['rounds'])} given; use --rounds {MIN_PAIRS}"
    failed = [sum(one.get("failed", 0) for one in record["rounds"]) for record in (a, b)]
    if any(failed):
        return f"requests failed ({failed[0]} of A, {failed[1]} of B): a server that turns work away looks fast"
    return ""


def _figure(
    figure: str, direction: int, rounds_a: Sequence[Any], rounds_b: Sequence[Any], threshold: float
) -> Change | None:
    pairs = [(one.get(figure), other.get(figure)) for one, other in zip(rounds_a, rounds_b, strict=True)]
    if not all(_is_positive(one) and _is_positive(other) for one, other in pairs):
        return None
    ratios = [log(other / one) for one, other in pairs]
    centre, low, high = interval(ratios)
    noise = 1.4826 * median([abs(ratio - median(ratios)) for ratio in ratios])
    share, verdict = exp(centre) - 1.0, SpeedVerdict.NO_DIFFERENCE
    if low * high > 0 and abs(share) >= threshold:
        verdict = SpeedVerdict.FASTER if (centre > 0) == (direction > 0) else SpeedVerdict.SLOWER
    middles = [median(side) for side in zip(*pairs, strict=True)]
    return Change(figure, middles[0], middles[1], share, exp(low) - 1.0, exp(high) - 1.0, exp(noise) - 1.0, verdict)


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


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value) and value > 0
