"""Compare servers A and B, by pairs of rounds that were measured interleaved in one run.

If two servers are measured one after the other, changes in the machine's load look like differences between them.
Interleaved rounds run under nearly equal conditions, so each round gives one ratio B/A. `quire.verdicts` decides
whether the ratios differ from one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quire.verdicts import MIN_PAIRS, THRESHOLD, Change, SpeedVerdict, change_of

HEADLINES = {"output_throughput": 1, "median_ttft_ms": -1, "median_tpot_ms": -1}
"""The compared metrics; 1 if higher is better, -1 if lower is better."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """The verdict and the changes it is based on, or the reason why the records cannot be compared."""

    verdict: SpeedVerdict
    changes: tuple[Change, ...] = ()
    reason: str = ""
    num_pairs: int = 0


def compare_records(a: Mapping[str, Any], b: Mapping[str, Any], threshold: float = THRESHOLD) -> Comparison:
    """Compare two records that `quire bench ab` wrote."""
    reason = why_not(a, b)
    if reason:
        return Comparison(SpeedVerdict.NOT_COMPARABLE, reason=reason)
    rounds_a, rounds_b = a["rounds"], b["rounds"]
    changes = [
        changed
        for figure, direction in HEADLINES.items()
        if (changed := change_of(figure, direction, _pairs(figure, rounds_a, rounds_b), threshold)) is not None
    ]
    if not changes:
        return Comparison(SpeedVerdict.NOT_COMPARABLE, reason="no metric was measured in every round of both")
    worst = next(kind for kind in SpeedVerdict if any(one.verdict == kind for one in changes))
    return Comparison(worst, tuple(changes), num_pairs=len(rounds_a))


def why_not(a: Mapping[str, Any], b: Mapping[str, Any]) -> str:
    """Return why two records cannot be compared; empty if they can."""
    for name, record in (("A", a), ("B", b)):
        if not isinstance(record.get("rounds"), list) or not record.get("run_id"):
            return f"{name} is not one side of a run of `quire bench ab`; only interleaved rounds can be compared"
    for what, key in (("run", "run_id"), ("machine", "machine"), ("load", "load")):
        if a.get(key) != b.get(key):
            return f"A and B are not of one {what}; measure both in one run: quire bench ab --a URL --b URL"
    if len(a["rounds"]) != len(b["rounds"]):
        return f"A has {len(a['rounds'])} rounds and B {len(b['rounds'])}; a run was cut short"
    if len(a["rounds"]) < MIN_PAIRS:
        return f"expected at least {MIN_PAIRS} rounds for a verdict, got {len(a['rounds'])}; use --rounds {MIN_PAIRS}"
    failed = [sum(one.get("failed", 0) for one in record["rounds"]) for record in (a, b)]
    if any(failed):
        return f"requests failed ({failed[0]} of A, {failed[1]} of B): a server that rejects work looks fast"
    return ""


def _pairs(figure: str, rounds_a: Sequence[Any], rounds_b: Sequence[Any]) -> list[tuple[object, object]]:
    return [(one.get(figure), other.get(figure)) for one, other in zip(rounds_a, rounds_b, strict=True)]
