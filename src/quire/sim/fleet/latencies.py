"""What requests of a simulated fleet waited for, in a few bytes for each: a million of them must fit."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Spread:
    """Of many figures."""

    p50: float
    p90: float
    p95: float
    p99: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """Zeros where there are none."""
        ordered = sorted(values)
        if not ordered:
            return cls(0.0, 0.0, 0.0, 0.0)
        p50, p90, p95, p99 = (ordered[rank_of(share, len(ordered))] for share in (0.5, 0.9, 0.95, 0.99))
        return cls(p50, p90, p95, p99)


def rank_of(share: float, num_values: int) -> int:
    """Which of so many ordered figures, from 0, is the one that this share lies below."""
    return min(num_values - 1, int(share * num_values))


class Latencies:
    """Of one fleet: from arrival to the first token, and between tokens."""

    is_hopeless = False
    """Whether nobody needs the rest of the run."""

    def __init__(self) -> None:
        self._open: dict[str, tuple[float, float | None]] = {}
        """Arrival and first token of who is not done."""
        self.ttft_s = array("d")
        self.tpot_s = array("d")
        """Seconds for each token behind the first, of those who had more than one."""
        self.num_output_tokens = 0

    def arrived(self, name: str, now_s: float) -> None:
        """It was sent."""
        self._open[name] = (now_s, None)

    def began(self, name: str, now_s: float) -> None:
        """Its first token is there; a second time, after a move, changes nothing."""
        arrival_s, first_s = self._open[name]
        if first_s is None:
            self._open[name] = (arrival_s, now_s)
            self.ttft_s.append(now_s - arrival_s)

    def ended(self, name: str, num_tokens: int, now_s: float) -> None:
        """Its last token is there."""
        _, first_s = self._open.pop(name)
        self.num_output_tokens += num_tokens
        if first_s is not None and num_tokens > 1:
            self.tpot_s.append((now_s - first_s) / (num_tokens - 1))

    def dropped(self, name: str) -> None:
        """Nobody could take it."""
        self._open.pop(name)

    @property
    def num_open(self) -> int:
        """Sent, and not done."""
        return len(self._open)
