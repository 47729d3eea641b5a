"""The result of a simulated fleet, and latencies stored in a few bytes per request, so that a million of them fit."""

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
        ordered = sorted(values)
        if not ordered:
            return cls(0.0, 0.0, 0.0, 0.0)
        p50, p90, p95, p99 = (ordered[rank_of(share, len(ordered))] for share in (0.5, 0.9, 0.95, 0.99))
        return cls(p50, p90, p95, p99)


def rank_of(share: float, num_values: int) -> int:
    """Return the 0-based index of the percentile `share` in a sorted list."""
    return min(num_values - 1, int(share * num_values))


class Latencies:
    """Latencies of one fleet: time to first token, and time per output token."""

    is_hopeless = False
    """Whether the run may stop, because its result is already certain."""

    def __init__(self) -> None:
        self._open: dict[str, tuple[float, float | None]] = {}
        """Arrival time and first-token time of unfinished requests."""
        self.ttft_s = array("d")
        self.tpot_s = array("d")
        """Seconds per output token after the first, of requests with more than one."""
        self.num_output_tokens = 0

    def arrived(self, name: str, now_s: float) -> None:
        """Record the arrival of a request."""
        self._open[name] = (now_s, None)

    def began(self, name: str, now_s: float) -> None:
        """Record the first token of a request; repeated calls, after a move to another member, are ignored."""
        arrival_s, first_s = self._open[name]
        if first_s is None:
            self._open[name] = (arrival_s, now_s)
            self.ttft_s.append(now_s - arrival_s)

    def ended(self, name: str, num_tokens: int, now_s: float) -> None:
        """Record the last token of a request."""
        _, first_s = self._open.pop(name)
        self.num_output_tokens += num_tokens
        if first_s is not None and num_tokens > 1:
            self.tpot_s.append((now_s - first_s) / (num_tokens - 1))

    def dropped(self, name: str) -> None:
        """Record that a request was rejected."""
        self._open.pop(name)

    @property
    def num_open(self) -> int:
        return len(self._open)


@dataclass(frozen=True, slots=True)
class MemberFigures:
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
    """Requests that never ended, which would be a defect."""
    num_moves: int
    num_deaths: int
    num_sent_to_dead: int
    """Requests sent to dead members before their death was detected; they moved to other members later."""
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    simulated_s: float
    ttft_s: Spread
    tpot_s: Spread
    members: tuple[MemberFigures, ...]
    log_digest: str

    @property
    def hit_rate(self) -> float:
        """Share of prompt tokens that were reused from the cache."""
        return self.num_cached_tokens / self.num_prompt_tokens if self.num_prompt_tokens else 0.0

    @property
    def imbalance(self) -> float:
        """Maximum over mean of the prompt tokens computed by each member."""
        work = [one.num_prompt_tokens_computed for one in self.members]
        return max(work) * len(work) / sum(work) if sum(work) else 1.0

    @property
    def output_tokens_per_s(self) -> float:
        """Throughput over the simulated time."""
        return self.num_output_tokens / self.simulated_s if self.simulated_s else 0.0

    @property
    def utilisation(self) -> float:
        """Mean share of the simulated time in which members computed."""
        busy_s = sum(one.busy_s for one in self.members)
        return busy_s / (self.simulated_s * len(self.members)) if self.simulated_s else 0.0

    def as_json(self) -> dict[str, object]:
        """Return all metrics, including the derived ones."""
        derived = ("hit_rate", "imbalance", "output_tokens_per_s", "utilisation")
        return {**asdict(self), **{name: getattr(self, name) for name in derived}}
