"""Latencies of a simulated fleet's requests, in a few bytes each: a million of them must fit."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Spread:
    """Percentiles of a list of values."""

    p50: float
    p90: float
    p95: float
    p99: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """The percentiles; zeros without values."""
        ordered = sorted(values)
        if not ordered:
            return cls(0.0, 0.0, 0.0, 0.0)
        p50, p90, p95, p99 = (ordered[rank_of(share, len(ordered))] for share in (0.5, 0.9, 0.95, 0.99))
        return cls(p50, p90, p95, p99)


def rank_of(share: float, num_values: int) -> int:
    """The index, from 0, of the percentile `share` among so many sorted values."""
    return min(num_values - 1, int(share * num_values))


class Latencies:
    """Latencies of one fleet: from arrival to the first token, and between tokens."""

    is_hopeless = False
    """Whether the rest of the run is not needed."""

    def __init__(self) -> None:
        self._open: dict[str, tuple[float, float | None]] = {}
        """Arrival and first token of unfinished requests."""
        self.ttft_s = array("d")
        self.tpot_s = array("d")
        """Seconds per token after the first, of requests with more than one."""
        self.num_output_tokens = 0

    def arrived(self, name: str, now_s: float) -> None:
        """The request arrived."""
        self._open[name] = (now_s, None)

    def began(self, name: str, now_s: float) -> None:
        """It has its first token; a second call, after a move, changes nothing."""
        arrival_s, first_s = self._open[name]
        if first_s is None:
            self._open[name] = (arrival_s, now_s)
            self.ttft_s.append(now_s - arrival_s)

    def ended(self, name: str, num_tokens: int, now_s: float) -> None:
        """It has its last token."""
        _, first_s = self._open.pop(name)
        self.num_output_tokens += num_tokens
        if first_s is not None and num_tokens > 1:
            self.tpot_s.append((now_s - first_s) / (num_tokens - 1))

    def dropped(self, name: str) -> None:
        """It was rejected."""
        self._open.pop(name)

    @property
    def num_open(self) -> int:
        return len(self._open)
