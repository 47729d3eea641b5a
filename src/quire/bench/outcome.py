"""The outcome of one request: timestamps and counts, from which all metrics are computed.

Timestamps are absolute seconds of a monotonic clock, so that they can be compared with those of another process.
"""

from dataclasses import dataclass
from functools import cached_property

# Values of `Outcome.error`. The value of an HTTP error contains its status, for example "http 503".
CONNECT = "connect"
"""No connection could be made."""
TIMEOUT = "timeout"
BROKEN = "broken"
"""The stream ended before its last event."""
UNREADABLE = "unreadable"
"""The server sent something that does not conform to the API."""
SERVER = "server"
"""The server reported an error in the stream."""
EMPTY = "empty"
"""The answer has no token."""


@dataclass(frozen=True)
class Outcome:
    """The client's view of one request."""

    name: str
    kind: str
    """The kind of client in a mixed workload."""
    due_s: float
    """When the request should have been sent; it was sent later if the client was busy."""
    sent_s: float
    ended_s: float
    token_s: tuple[float, ...]
    """Arrival times of the events with text."""
    pieces: tuple[str, ...]
    """The texts of the events with text."""
    prompt_tokens: int
    """As counted by the server, or the intended number if the server does not report it."""
    output_tokens: int
    """As counted by the server, or the number of events with text if the server does not report it."""
    cached_tokens: int | None
    """Prompt tokens that the server found in its cache; None if the server does not report it."""
    finish_reason: str | None
    error: str | None = None
    """The kind of failure; None: success."""
    detail: str = ""

    @property
    def is_ok(self) -> bool:
        """Whether a complete answer arrived."""
        return self.error is None

    @cached_property
    def text(self) -> str:
        return "".join(self.pieces)

    @property
    def ttft_s(self) -> float:
        """Time to the first text."""
        return self.token_s[0] - self.sent_s

    @property
    def e2e_s(self) -> float:
        """Time to the last text; later data (usage, end of stream) is not counted."""
        return self.token_s[-1] - self.sent_s

    @property
    def tpot_s(self) -> float:
        """Mean time per token after the first; 0 for a single token."""
        return (self.e2e_s - self.ttft_s) / (self.output_tokens - 1) if self.output_tokens > 1 else 0.0

    @property
    def itl_s(self) -> list[float]:
        """Times between events; tokens in one event have no time between them."""
        return [later_s - earlier_s for earlier_s, later_s in zip(self.token_s, self.token_s[1:], strict=False)]


@dataclass(frozen=True)
class Run:
    """The outcomes of all requests of one load."""

    started_s: float
    ended_s: float
    outcomes: tuple[Outcome, ...]

    @property
    def duration_s(self) -> float:
        """Time until the last response ended."""
        return self.ended_s - self.started_s
