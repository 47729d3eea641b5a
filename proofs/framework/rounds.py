"""A row that is a ratio of speeds: judged by the rule of `benchmarks/rounds.py`, recorded with its interval."""

from collections.abc import Sequence

from benchmarks.record import say
from benchmarks.rounds import RatioInterval
from proofs.framework.proof import Proof


def judge_ratio(
    proof: Proof, key: str, ratios: Sequence[float], *, at_most: float | None = None, at_least: float | None = None
) -> None:
    """Report the median and its interval, and judge the median by `RatioInterval.is_within`."""
    ratio = RatioInterval.of(ratios)
    proof.report(f"{key}_low", ratio.low)
    proof.report(f"{key}_high", ratio.high)
    proof.report(f"{key}_rounds", len(ratios))
    bounds = {"at most": at_most, "at least": at_least}
    bound = " and ".join(f"{words} {value:g}" for words, value in bounds.items() if value is not None)
    if ratio.is_wide:
        say(f"    {key}: the interval is wider than a fifth of its median; the median is judged instead")
    proof.judge(key, ratio.median, f"interval not wholly beyond: {bound}", holds=ratio.is_within(at_most, at_least))
