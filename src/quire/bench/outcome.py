"""What became of one request: plain stamps and counts, the ground everything else is computed from.

Stamps are seconds of one monotonic clock, absolute, so that they can be laid beside those of another process.
"""

from dataclasses import dataclass
from functools import cached_property

# The ways a request can fail. An HTTP refusal has its status as its kind: "http 503".
CONNECT = "connect"
"""No connection could be made."""
TIMEOUT = "timeout"
BROKEN = "broken"
"""The stream ended before its last event."""
UNREADABLE = "unreadable"
"""The server sent something that is not what the API says."""
SERVER = "server"
"""The server said in the stream that it failed."""
EMPTY = "empty"
"""An answer without a token."""


@dataclass(frozen=True)
class Outcome:
    """One request as its client saw it."""

    name: str
    kind: str
    """Which class of a mixed workload."""
    due_s: float
    """When it should have been sent: later than that, and the client was late."""
    sent_s: float
    ended_s: float
    token_s: tuple[float, ...]
    """When each event that carried text came."""
    pieces: tuple[str, ...]
    """What those events carried."""
    prompt_tokens: int
    """As the server counted them; as they were meant, where it did not say."""
    output_tokens: int
    """As the server counted them; events, where it did not say."""
    cached_tokens: int | None
    """Prompt tokens the server found in its cache; None where it does not say."""
    finish_reason: str | None
    error: str | None = None
    """Its kind, or None: it went well."""
    detail: str = ""

    @property
    def is_ok(self) -> bool:
        """Whether an answer came, whole."""
        return self.error is None

    @cached_property
    def text(self) -> str:
        return "".join(self.pieces)

    @property
    def ttft_s(self) -> float:
        """Until the first text."""
        return self.token_s[0] - self.sent_s

    @property
    def e2e_s(self) -> float:
        """Until the last text; what the server sends after it (usage, the end mark) keeps no reader waiting."""
        return self.token_s[-1] - self.sent_s

    @property
    def tpot_s(self) -> float:
        """From token to token after the first; 0 for a single one."""
        return (self.e2e_s - self.ttft_s) / (self.output_tokens - 1) if self.output_tokens > 1 else 0.0

    @property
    def itl_s(self) -> list[float]:
        """Gaps between events: tokens that come together have none."""
        return [later - sooner for sooner, later in zip(self.token_s, self.token_s[1:], strict=False)]


@dataclass(frozen=True)
class Run:
    """All requests of one load."""

    started_s: float
    ended_s: float
    outcomes: tuple[Outcome, ...]

    @property
    def duration_s(self) -> float:
        """Until the last answer ended."""
        return self.ended_s - self.started_s
