"""Metrics of a run, with the names of `vllm bench serve`, so that scripts for its results can read these. Pure.

    ttft   time to the first text            tpot   (e2el - ttft) / (output tokens - 1), without single-token answers
    itl    time between two events           e2el   time to the last text

Throughput is relative to the whole duration. Goodput counts the requests that met all limits of the objective.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, floor
from statistics import fmean, median, pstdev
from typing import Any

from quire.bench.outcome import Outcome, Run
from quire.errors import ConfigError

PERCENTILES = (50.0, 90.0, 95.0, 99.0)
LIMITS = ("ttft", "tpot", "e2el")

Measures = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Objective:
    """The limits that a good request meets, in milliseconds; None: no limit."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2el_ms: float | None = None

    @classmethod
    def parse(cls, words: Sequence[str]) -> "Objective | None":
        """Parse `ttft:500`, `tpot:50` and the like; None for an empty list. Raises ConfigError for invalid text."""
        limits: dict[str, float] = {}
        for word in words:
            name, _, number = word.partition(":")
            try:
                limit = float(number)
            except ValueError:
                limit = -1.0
            if name not in LIMITS or not limit > 0:
                forms = ", ".join(f"{one}:MS" for one in LIMITS)
                raise ConfigError(f"expected an objective of {forms} with more than 0 ms, got {word!r}", ("goodput",))
            limits[f"{name}_ms"] = limit
        return cls(**limits) if limits else None

    def is_kept(self, outcome: Outcome) -> bool:
        """Whether a request met all limits."""
        taken = ((self.ttft_ms, outcome.ttft_s), (self.tpot_ms, outcome.tpot_s), (self.e2el_ms, outcome.e2e_s))
        return all(limit is None or seconds * 1000.0 <= limit for limit, seconds in taken)


def measured(run: Run, objective: Objective | None = None, percentiles: Sequence[float] = PERCENTILES) -> Measures:
    """Return all metrics of a run."""
    good = [one for one in run.outcomes if one.is_ok]
    failed = [one for one in run.outcomes if not one.is_ok]
    return {
        **totals(good, run.duration_s),
        "failed": len(failed),
        "error_kinds": dict(Counter(one.error for one in failed)),
        "request_goodput": _goodput(good, run.duration_s, objective),
        "max_output_tokens_per_s": busiest_second(good),
        "max_concurrent_requests": most_at_once((one.sent_s, one.ended_s) for one in run.outcomes),
        "rtfx": 0.0,
        "median_client_lateness_ms": _ms(median([one.sent_s - one.due_s for one in run.outcomes] or [0.0])),
        **latencies(good, percentiles),
        **cache(good),
        **_kinds(good, run.duration_s),
    }


def totals(good: Sequence[Outcome], duration_s: float) -> Measures:
    """Return counts and rates of the successful requests."""
    num_in, num_out = sum(one.prompt_tokens for one in good), sum(one.output_tokens for one in good)
    per_s = 1.0 / duration_s if duration_s > 0 else 0.0
    return {
        "duration": duration_s,
        "completed": len(good),
        "total_input_tokens": num_in,
        "total_output_tokens": num_out,
        "request_throughput": len(good) * per_s,
        "output_throughput": num_out * per_s,
        "total_token_throughput": (num_in + num_out) * per_s,
    }


def latencies(good: Sequence[Outcome], percentiles: Sequence[float] = PERCENTILES) -> Measures:
    """Return mean, median, standard deviation and percentiles of each latency in ms; null without samples."""
    samples = {
        "ttft": [one.ttft_s for one in good],
        "tpot": [one.tpot_s for one in good if one.output_tokens > 1],
        "itl": [gap for one in good for gap in one.itl_s],
        "e2el": [one.e2e_s for one in good],
    }
    figures: Measures = {}
    for name, seconds in samples.items():
        ordered = sorted(seconds)
        figures[f"mean_{name}_ms"] = _ms(fmean(ordered)) if ordered else None
        figures[f"median_{name}_ms"] = _ms(median(ordered)) if ordered else None
        figures[f"std_{name}_ms"] = _ms(pstdev(ordered)) if ordered else None
        for percent in percentiles:
            figures[f"p{percent:g}_{name}_ms"] = _ms(percentile(ordered, percent)) if ordered else None
    return figures


def cache(good: Sequence[Outcome]) -> Measures:
    """Return the cached prompt tokens and their share; null if the server does not report them."""
    counted = [one for one in good if one.cached_tokens is not None]
    if not counted:
        return {"total_cached_tokens": None, "cached_token_share": None}
    cached, prompt_tokens = sum(one.cached_tokens or 0 for one in counted), sum(one.prompt_tokens for one in counted)
    return {"total_cached_tokens": cached, "cached_token_share": cached / prompt_tokens if prompt_tokens else 0.0}


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Return a percentile by linear interpolation, like numpy's default."""
    place = (len(ordered) - 1) * percent / 100.0
    low, high = ordered[floor(place)], ordered[ceil(place)]
    return low + (high - low) * (place - floor(place))


def most_at_once(spans: Iterable[tuple[float, float]]) -> int:
    """Return the maximum number of concurrent requests."""
    # At equal times, ends sort before starts, so back-to-back requests do not count as concurrent.
    edges = sorted(edge for start, end in spans for edge in ((start, 1), (end, -1)))
    highest = open_now = 0
    for _, change in edges:
        open_now += change
        highest = max(highest, open_now)
    return highest


def busiest_second(good: Sequence[Outcome]) -> float:
    """Return the maximum tokens in one second of the run. An answer's tokens are distributed evenly over its events."""
    weights: dict[int, float] = {}
    first_s = min((one.sent_s for one in good), default=0.0)
    for one in good:
        weight = one.output_tokens / max(1, len(one.token_s))  # tokens without text may have no event
        for moment_s in one.token_s:
            second = int(moment_s - first_s)
            weights[second] = weights.get(second, 0.0) + weight
    return max(weights.values(), default=0.0)


def _goodput(good: Sequence[Outcome], duration_s: float, objective: Objective | None) -> float | None:
    if objective is None:
        return None
    return sum(objective.is_kept(one) for one in good) / duration_s if duration_s > 0 else 0.0


def _kinds(good: Sequence[Outcome], duration_s: float) -> Mapping[str, Measures]:
    """Return the main metrics of each kind of client, if there are several."""
    kinds = sorted({one.kind for one in good})
    if len(kinds) < 2:
        return {}
    by_kind = {kind: [one for one in good if one.kind == kind] for kind in kinds}
    wanted = ("median_ttft_ms", "p99_ttft_ms", "median_tpot_ms", "p99_tpot_ms")
    return {
        "by_kind": {
            kind: {
                **{name: totals(ones, duration_s)[name] for name in ("completed", "output_throughput")},
                **{name: latencies(ones, (99.0,))[name] for name in wanted},
                **cache(ones),
            }
            for kind, ones in by_kind.items()
        }
    }


def _ms(seconds: float) -> float:
    return seconds * 1000.0
