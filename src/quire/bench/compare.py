"""Compare servers A and B, by pairs of rounds that were measured interleaved in one run.

If two servers are measured one after the other, changes in the machine's load look like differences between them.
Interleaved rounds run under nearly equal conditions, so each round gives one ratio B/A. `quire.verdicts` decides
whether the ratios differ from 1.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quire.verdicts import MIN_PAIRS, THRESHOLD, Change, SpeedVerdict, change_of

MAIN_METRICS = {"output_throughput": 1, "median_ttft_ms": -1, "median_tpot_ms": -1}
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
    reason = reason_not_comparable(a, b)
    if reason:
        return Comparison(SpeedVerdict.NOT_COMPARABLE, reason=reason)
    rounds_a, rounds_b = a["rounds"], b["rounds"]
    changes = [
        change
        for metric, direction in MAIN_METRICS.items()
        if (change := change_of(metric, direction, _pairs(metric, rounds_a, rounds_b), threshold)) is not None
    ]
    if not changes:
        return Comparison(SpeedVerdict.NOT_COMPARABLE, reason="no metric was measured in every round of both servers")
    verdict = next(verdict for verdict in SpeedVerdict if any(change.verdict == verdict for change in changes))
    return Comparison(verdict, tuple(changes), num_pairs=len(rounds_a))


def reason_not_comparable(a: Mapping[str, Any], b: Mapping[str, Any]) -> str:
    """Return why two records cannot be compared; empty if they can."""
    for name, record in (("A", a), ("B", b)):
        if not isinstance(record.get("rounds"), list) or not record.get("run_id"):
            return f"{name} is not a result of `quire bench ab`; only its interleaved rounds can be compared"
    for noun, key in (("run", "run_id"), ("machine", "machine"), ("load", "load")):
        if a.get(key) != b.get(key):
            return f"A and B are not from the same {noun}; measure both in one run: quire bench ab --a URL --b URL"
    if len(a["rounds"]) != len(b["rounds"]):
        return f"A has {len(a['rounds'])} rounds and B has {len(b['rounds'])}; a run was interrupted"
    if len(a["rounds"]) < MIN_PAIRS:
        return f"expected at least {MIN_PAIRS} rounds for a verdict, got {len(a['rounds'])}; use --rounds {MIN_PAIRS}"
    failed = [sum(metrics.get("failed", 0) for metrics in record["rounds"]) for record in (a, b)]
    if any(failed):
        return f"requests failed ({failed[0]} of A, {failed[1]} of B): a server that rejects work looks fast"
    return ""


def _pairs(metric: str, rounds_a: Sequence[Any], rounds_b: Sequence[Any]) -> list[tuple[object, object]]:
    return [(a.get(metric), b.get(metric)) for a, b in zip(rounds_a, rounds_b, strict=True)]
