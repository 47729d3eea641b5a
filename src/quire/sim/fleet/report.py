"""The result of a simulated fleet, and its latencies: a few bytes per request, so that a million requests fit."""

from array import array
from collections.abc import Sequence
from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class Spread:
    """Percentiles of a list of values."""

    p50: float
    p90: float
    p95: float
    p99: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """Return the percentiles; zeros if there are no values."""
        ranked = sorted(values)
        if not ranked:
            return cls(0.0, 0.0, 0.0, 0.0)
        p50, p90, p95, p99 = (ranked[percentile_index(share, len(ranked))] for share in (0.5, 0.9, 0.95, 0.99))
        return cls(p50, p90, p95, p99)


def percentile_index(share: float, num_values: int) -> int:
    """Return the 0-based index of the percentile `share` in a sorted list."""
    return min(num_values - 1, int(share * num_values))


class Latencies:
    """Latencies of one fleet: time to first token, and time per output token."""

    is_objective_missed = False
    """Whether the run may stop, because it is certain to miss its latency objective (`watched_latencies`)."""

    def __init__(self) -> None:
        self._open: dict[str, tuple[float, float | None]] = {}
        """Arrival time and first-token time of unfinished requests, by name."""
        self.ttft_s = array("d")
        self.tpot_s = array("d")
        """Seconds per output token after the first, of requests with more than one."""
        self.num_output_tokens = 0

    def record_arrival(self, name: str, now_s: float) -> None:
        """Record the arrival of a request."""
        self._open[name] = (now_s, None)

    def record_first_token(self, name: str, now_s: float) -> None:
        """Record the first token of a request; a second call, after a move to another member, is ignored."""
        arrival_s, first_s = self._open[name]
        if first_s is None:
            self._open[name] = (arrival_s, now_s)
            self.ttft_s.append(now_s - arrival_s)

    def record_end(self, name: str, num_tokens: int, now_s: float) -> None:
        """Record the last token of a request."""
        _, first_s = self._open.pop(name)
        self.num_output_tokens += num_tokens
        if first_s is not None and num_tokens > 1:
            self.tpot_s.append((now_s - first_s) / (num_tokens - 1))

    def record_rejection(self, name: str) -> None:
        """Record that a request was rejected."""
        self._open.pop(name)

    @property
    def num_open(self) -> int:
        return len(self._open)


@dataclass(frozen=True, slots=True)
class MemberMetrics:
    """Metrics of one member slot."""

    number: int
    num_requests: int
    num_prompt_tokens_computed: int
    busy_s: float


@dataclass(frozen=True, slots=True)
class FleetReport:
    """The result of a whole run."""

    num_requests: int
    num_refused: int
    num_lost: int
    """Requests that never ended; more than zero is a bug."""
    num_moves: int
    num_deaths: int
    num_sent_to_dead: int
    """Requests sent to dead members before gateways detected the death; they moved to other members later."""
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    simulated_s: float
    ttft_s: Spread
    tpot_s: Spread
    members: tuple[MemberMetrics, ...]
    log_digest: str

    @property
    def hit_rate(self) -> float:
        """Share of prompt tokens that were reused from the cache."""
        return self.num_cached_tokens / self.num_prompt_tokens if self.num_prompt_tokens else 0.0

    @property
    def imbalance(self) -> float:
        """Maximum over mean of the prompt tokens computed by each member."""
        num_tokens = [member.num_prompt_tokens_computed for member in self.members]
        return max(num_tokens) * len(num_tokens) / sum(num_tokens) if sum(num_tokens) else 1.0

    @property
    def output_tokens_per_s(self) -> float:
        """Throughput over the simulated time."""
        return self.num_output_tokens / self.simulated_s if self.simulated_s else 0.0

    @property
    def utilisation(self) -> float:
        """Mean share of the simulated time in which members computed."""
        busy_s = sum(member.busy_s for member in self.members)
        return busy_s / (self.simulated_s * len(self.members)) if self.simulated_s else 0.0

    def as_json(self) -> dict[str, object]:
        """Return all metrics, including the derived ones."""
        derived = ("hit_rate", "imbalance", "output_tokens_per_s", "utilisation")
        return {**asdict(self), **{name: getattr(self, name) for name in derived}}
