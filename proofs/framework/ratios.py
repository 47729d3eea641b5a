"""Ratios of times that were taken turn about, with the spread of the rounds beside them."""

from collections.abc import Sequence
from statistics import median, quantiles

from proofs.framework.proof import Proof


def spread(values: Sequence[float]) -> float:
    """The interquartile range."""
    first, _, third = quantiles(values, n=4)
    return third - first


def report_ratio(
    proof: Proof, key: str, over: Sequence[float], under: Sequence[float], least: float | None = None
) -> None:
    """median(over) / median(under), which must be at least so much, and the spread of the rounds."""
    value = median(over) / median(under)
    told = f"{median(over) * 1e3:.1f} / {median(under) * 1e3:.1f} ms"
    if least is None:
        proof.report(key, value, told)
    else:
        proof.at_least(key, value, least, told)
    proof.report(f"{key}_spread", spread([one / other for one, other in zip(over, under, strict=True)]))
