"""Ratios of two programs' times, measured in alternating rounds, and the spread of these ratios."""

from collections.abc import Sequence
from statistics import median, quantiles

from proofs.framework.proof import Proof


def spread(values: Sequence[float]) -> float:
    """The interquartile range."""
    first, _, third = quantiles(values, n=4)
    return third - first


def report_ratio(
    proof: Proof, key: str, over_s: Sequence[float], under_s: Sequence[float], min_ratio: float | None = None
) -> None:
    """Report median(over_s) / median(under_s), which must be at least `min_ratio`, and the spread over the rounds."""
    value = median(over_s) / median(under_s)
    note = f"{median(over_s) * 1e3:.1f} / {median(under_s) * 1e3:.1f} ms"
    if min_ratio is None:
        proof.report(key, value, note)
    else:
        proof.at_least(key, value, min_ratio, note)
    proof.report(f"{key}_spread", spread([a / b for a, b in zip(over_s, under_s, strict=True)]))
