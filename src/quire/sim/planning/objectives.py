"""Latency objectives of a fleet: limits on percentiles of the time to first token and of the time per output token.

    ttft_p95=2s,tpot_p95=80ms

A rejected or unfinished request misses every objective. The number of requests determines how many of them may exceed
a limit, so a run can stop as soon as more have exceeded it.
"""

import re
from dataclasses import dataclass, replace

from quire.errors import ConfigError
from quire.sim.fleet.report import FleetReport, Spread, rank_of

LATENCIES = ("ttft", "tpot")
PERCENTS = (50, 90, 95, 99)
UNITS_S = {"s": 1.0, "ms": 1e-3}
MAX_LIMIT_S = 86_400.0
_FORM = re.compile(r"(?P<latency>[a-z]+)_p(?P<percent>\d+)=(?P<number>\d+(?:\.\d+)?)(?P<unit>s|ms)")


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
        return f"{self.latency.upper()} p{self.percent} at most {in_words(self.latency, self.limit_s)}"

    def found_s(self, report: FleetReport) -> float:
        """Return the percentile's value in a run."""
        spread: Spread = getattr(report, f"{self.latency}_s")
        found: float = getattr(spread, f"p{self.percent}")
        return found

    def num_allowed(self, num_values: int) -> int:
        """Return how many values may exceed the limit without moving the percentile above it."""
        return num_values - 1 - rank_of(self.percent / 100, num_values) if num_values else 0


@dataclass(frozen=True, slots=True)
class LatencyObjective:
    """A set of limits, all of which must be met."""

    limits: tuple[LatencyLimit, ...]

    @classmethod
    def parse(cls, text: str) -> "LatencyObjective":
        """Parse a text such as `ttft_p95=2s,tpot_p95=80ms`. Raises ConfigError if it is invalid."""
        limits = tuple(_limit(part.strip(), text) for part in text.split(","))
        if len({one.name for one in limits}) < len(limits):
            raise ConfigError(f"expected each percentile once in an objective, got {text!r}; leave the second one out")
        return cls(limits)

    def misses(self, report: FleetReport) -> tuple[str, ...]:
        """Return the limits that a run missed, as text; empty if the objective is met."""
        missed = []
        if report.num_refused:
            missed.append(f"{report.num_refused:,} requests rejected")
        if report.num_lost:
            missed.append(f"{report.num_lost:,} requests unfinished")
        missed += [
            f"{one.latency.upper()} p{one.percent} is {in_words(one.latency, one.found_s(report))}"
            for one in self.limits
            if one.found_s(report) > one.limit_s
        ]
        return tuple(missed)

    def times(self, factor: float) -> "LatencyObjective":
        """Return the objective with every limit multiplied by `factor`."""
        return LatencyObjective(tuple(replace(one, limit_s=one.limit_s * factor) for one in self.limits))

    @property
    def words(self) -> str:
        return ", ".join(one.words for one in self.limits)


def in_words(latency: str, seconds: float) -> str:
    """Format a latency: TTFT in seconds, TPOT in milliseconds."""
    return f"{seconds:.3g} s" if latency == "ttft" else f"{seconds * 1e3:.3g} ms"


def _limit(part: str, text: str) -> LatencyLimit:
    found = _FORM.fullmatch(part)
    if found is None or found["latency"] not in LATENCIES or int(found["percent"]) not in PERCENTS:
        names = " or ".join(LATENCIES)
        percents = ", ".join(f"p{one}" for one in PERCENTS)
        raise ConfigError(
            f"expected an objective of {names}, one of {percents}, and a time in s or ms, such as "
            f"ttft_p95=2s,tpot_p95=80ms, got {part!r} in {text!r}",
            code="invalid_objective",
        )
    limit_s = float(found["number"]) * UNITS_S[found["unit"]]
    if not 0.0 < limit_s <= MAX_LIMIT_S:
        rule = f"expected a limit above 0 and at most {MAX_LIMIT_S:,.0f} s, got {part!r}; give a longer time"
        raise ConfigError(rule, code="invalid_time_limit")
    return LatencyLimit(found["latency"], int(found["percent"]), limit_s)
