"""Metrics of a run, with the names of `vllm bench serve`, so that scripts written for its results can read these. Pure.

    ttft   time to the first text            tpot   (e2el - ttft) / (output tokens - 1), of answers with several tokens
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
LIMITED_LATENCIES = ("ttft", "tpot", "e2el")

MetricMap = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Objective:
    """Latency limits in milliseconds that a request must meet to count as goodput; None: no limit."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2el_ms: float | None = None

    @classmethod
    def parse(cls, texts: Sequence[str]) -> "Objective | None":
        """Parse `ttft:500`, `tpot:50` and the like; None for an empty list. Raises ConfigError for invalid text."""
        limits: dict[str, float] = {}
        for text in texts:
            name, _, number = text.partition(":")
            try:
                limit = float(number)
            except ValueError:
                limit = -1.0
            if name not in LIMITED_LATENCIES or not limit > 0:
                forms = ", ".join(f"{name}:MS" for name in LIMITED_LATENCIES)
                raise ConfigError(f"expected one of {forms} with more than 0 ms, got {text!r}", ("goodput",))
            limits[f"{name}_ms"] = limit
        return cls(**limits) if limits else None

    def is_met_by(self, outcome: Outcome) -> bool:
        """Whether a request met all limits."""
        latencies_s = ((self.ttft_ms, outcome.ttft_s), (self.tpot_ms, outcome.tpot_s), (self.e2el_ms, outcome.e2e_s))
        return all(limit is None or seconds * 1000.0 <= limit for limit, seconds in latencies_s)


def metrics_of(run: Run, objective: Objective | None = None, percentiles: Sequence[float] = PERCENTILES) -> MetricMap:
    """Return all metrics of a run."""
    good = [outcome for outcome in run.outcomes if outcome.is_ok]
    failed = [outcome for outcome in run.outcomes if not outcome.is_ok]
    return {
        **totals(good, run.duration_s),
        "failed": len(failed),
        "error_kinds": dict(Counter(outcome.error for outcome in failed)),
        "request_goodput": _goodput(good, run.duration_s, objective),
        "max_output_tokens_per_s": busiest_second(good),
        "max_concurrent_requests": max_concurrent((outcome.sent_s, outcome.ended_s) for outcome in run.outcomes),
        "rtfx": 0.0,
        "median_client_lateness_ms": _ms(median([outcome.sent_s - outcome.due_s for outcome in run.outcomes] or [0.0])),
        **latencies(good, percentiles),
        **cache(good),
        **_kinds(good, run.duration_s),
    }


def totals(good: Sequence[Outcome], duration_s: float) -> MetricMap:
    """Return counts and rates of the successful requests."""
    num_in, num_out = sum(outcome.prompt_tokens for outcome in good), sum(outcome.output_tokens for outcome in good)
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


def latencies(good: Sequence[Outcome], percentiles: Sequence[float] = PERCENTILES) -> MetricMap:
    """Return mean, median, standard deviation and percentiles of each latency in ms; null without samples."""
    samples = {
        "ttft": [outcome.ttft_s for outcome in good],
        "tpot": [outcome.tpot_s for outcome in good if outcome.output_tokens > 1],
        "itl": [gap for outcome in good for gap in outcome.itl_s],
        "e2el": [outcome.e2e_s for outcome in good],
    }
    metrics: MetricMap = {}
    for name, seconds in samples.items():
        ordered = sorted(seconds)
        metrics[f"mean_{name}_ms"] = _ms(fmean(ordered)) if ordered else None
        metrics[f"median_{name}_ms"] = _ms(median(ordered)) if ordered else None
        metrics[f"std_{name}_ms"] = _ms(pstdev(ordered)) if ordered else None
        for percent in percentiles:
            metrics[f"p{percent:g}_{name}_ms"] = _ms(percentile(ordered, percent)) if ordered else None
    return metrics


def cache(good: Sequence[Outcome]) -> MetricMap:
    """Return the cached prompt tokens and their share; null if the server does not report them."""
    counts = [(outcome.cached_tokens, outcome.prompt_tokens) for outcome in good if outcome.cached_tokens is not None]
    if not counts:
        return {"total_cached_tokens": None, "cached_token_share": None}
    cached, prompt_tokens = sum(num_cached for num_cached, _ in counts), sum(num_tokens for _, num_tokens in counts)
    return {"total_cached_tokens": cached, "cached_token_share": cached / prompt_tokens if prompt_tokens else 0.0}


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Return a percentile by linear interpolation, like numpy's default."""
    position = (len(ordered) - 1) * percent / 100.0
    low, high = ordered[floor(position)], ordered[ceil(position)]
    return low + (high - low) * (position - floor(position))


def max_concurrent(spans: Iterable[tuple[float, float]]) -> int:
    """Return the maximum number of concurrent requests."""
    # At equal times, ends sort before starts, so back-to-back requests do not count as concurrent.
    edges = sorted(edge for start, end in spans for edge in ((start, 1), (end, -1)))
    highest = num_open = 0
    for _, change in edges:
        num_open += change
        highest = max(highest, num_open)
    return highest


def busiest_second(good: Sequence[Outcome]) -> float:
    """Return the maximum number of tokens in one second. An answer's tokens are distributed evenly over its events."""
    weights: dict[int, float] = {}
    first_s = min((outcome.sent_s for outcome in good), default=0.0)
    for outcome in good:
        weight = outcome.output_tokens / max(1, len(outcome.token_s))  # tokens without text may have no event
        for time_s in outcome.token_s:
            second = int(time_s - first_s)
            weights[second] = weights.get(second, 0.0) + weight
    return max(weights.values(), default=0.0)


def _goodput(good: Sequence[Outcome], duration_s: float, objective: Objective | None) -> float | None:
    if objective is None:
        return None
    return sum(objective.is_met_by(outcome) for outcome in good) / duration_s if duration_s > 0 else 0.0


def _kinds(good: Sequence[Outcome], duration_s: float) -> Mapping[str, MetricMap]:
    """Return the main metrics of each kind of client, if there are several kinds."""
    kinds = sorted({outcome.kind for outcome in good})
    if len(kinds) < 2:
        return {}
    by_kind = {kind: [outcome for outcome in good if outcome.kind == kind] for kind in kinds}
    latency_names = ("median_ttft_ms", "p99_ttft_ms", "median_tpot_ms", "p99_tpot_ms")
    return {
        "by_kind": {
            kind: {
                **{name: totals(outcomes, duration_s)[name] for name in ("completed", "output_throughput")},
                **{name: latencies(outcomes, (99.0,))[name] for name in latency_names},
                **cache(outcomes),
            }
            for kind, outcomes in by_kind.items()
        }
    }


def _ms(seconds: float) -> float:
    return seconds * 1000.0
