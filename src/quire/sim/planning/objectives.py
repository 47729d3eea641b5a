"""Latency objectives of a fleet: limits on percentiles of the time to first token and of the time per output token.

    ttft_p95=2s,tpot_p95=80ms

A run with a rejected or unfinished request misses every objective. The number of requests determines how many of them
may exceed a limit, so a run can stop as soon as more have exceeded it.
"""

import re
from dataclasses import dataclass, replace

from quire.errors import ConfigError
from quire.sim.fleet.report import FleetReport, Spread, percentile_index

LATENCIES = ("ttft", "tpot")
PERCENTS = (50, 90, 95, 99)
UNIT_S = {"s": 1.0, "ms": 1e-3}
MAX_LIMIT_S = 86_400.0
_PATTERN = re.compile(r"(?P<latency>[a-z]+)_p(?P<percent>\d+)=(?P<number>\d+(?:\.\d+)?)(?P<unit>s|ms)")


@dataclass(frozen=True, slots=True)
class LatencyLimit:
    """A limit on one percentile."""

    latency: str
    """`ttft` or `tpot`."""
    percent: int
    limit_s: float

    @property
    def name(self) -> str:
        """The percentile as in the objective's text, for example `ttft_p95`."""
        return f"{self.latency}_p{self.percent}"

    @property
    def words(self) -> str:
        """The limit as text, for example `TTFT p95 at most 2 s`."""
        return f"{self.latency.upper()} p{self.percent} at most {latency_text(self.latency, self.limit_s)}"

    def value_s(self, report: FleetReport) -> float:
        """Return the percentile's value in a run."""
        percentiles: Spread = getattr(report, f"{self.latency}_s")
        value_s: float = getattr(percentiles, f"p{self.percent}")
        return value_s

    def num_allowed(self, num_values: int) -> int:
        """Return how many values may exceed the limit without moving the percentile above it."""
        return num_values - 1 - percentile_index(self.percent / 100, num_values) if num_values else 0


@dataclass(frozen=True, slots=True)
class LatencyObjective:
    """A set of limits, all of which must be met."""

    limits: tuple[LatencyLimit, ...]

    @classmethod
    def parse(cls, text: str) -> "LatencyObjective":
        """Parse a text such as `ttft_p95=2s,tpot_p95=80ms`. Raises ConfigError if it is invalid."""
        limits = tuple(_limit(part.strip(), text) for part in text.split(","))
        if len({limit.name for limit in limits}) < len(limits):
            raise ConfigError(f"expected each percentile once in an objective, got {text!r}; remove the duplicate")
        return cls(limits)

    def misses(self, report: FleetReport) -> tuple[str, ...]:
        """Return the limits that a run missed, as text; empty if the objective is met."""
        missed = []
        if report.num_refused:
            missed.append(f"{report.num_refused:,} requests rejected")
        if report.num_lost:
            missed.append(f"{report.num_lost:,} requests unfinished")
        missed += [
            f"{limit.latency.upper()} p{limit.percent} is {latency_text(limit.latency, limit.value_s(report))}"
            for limit in self.limits
            if limit.value_s(report) > limit.limit_s
        ]
        return tuple(missed)

    def scaled(self, factor: float) -> "LatencyObjective":
        """Return the objective with every limit multiplied by `factor`."""
        return LatencyObjective(tuple(replace(limit, limit_s=limit.limit_s * factor) for limit in self.limits))

    @property
    def words(self) -> str:
        return ", ".join(limit.words for limit in self.limits)


def latency_text(latency: str, seconds: float) -> str:
    """Format a latency: TTFT in seconds, TPOT in milliseconds."""
    return f"{seconds:.3g} s" if latency == "ttft" else f"{seconds * 1e3:.3g} ms"


def _limit(part: str, text: str) -> LatencyLimit:
    match = _PATTERN.fullmatch(part)
    if match is None or match["latency"] not in LATENCIES or int(match["percent"]) not in PERCENTS:
        names = " or ".join(LATENCIES)
        percents = ", ".join(f"p{percent}" for percent in PERCENTS)
        raise ConfigError(
            f"expected an objective of {names}, one of {percents}, and a time in s or ms, such as "
            f"ttft_p95=2s,tpot_p95=80ms, got {part!r} in {text!r}",
            code="invalid_objective",
        )
    limit_s = float(match["number"]) * UNIT_S[match["unit"]]
    if not 0.0 < limit_s <= MAX_LIMIT_S:
        message = f"expected a limit above 0 and at most {MAX_LIMIT_S:,.0f} s, got {part!r}; change the limit"
        raise ConfigError(message, code="invalid_time_limit")
    return LatencyLimit(match["latency"], int(match["percent"]), limit_s)
