"""What comes back: pieces while a request runs, a completion when it is done."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import groupby
from operator import attrgetter

from quire.client.prefix.explanation import Explanation
from quire.core.step import TokenLogprobs
from quire.text.parsers.parts import REASONING as REASONING  # noqa: PLC0414 - for the API, too
from quire.text.parsers.parts import TEXT as TEXT  # noqa: PLC0414
from quire.text.parsers.parts import Part as Part  # noqa: PLC0414
from quire.text.parsers.parts import ReasoningPart as ReasoningPart  # noqa: PLC0414
from quire.text.parsers.parts import TextPart as TextPart  # noqa: PLC0414
from quire.text.parsers.parts import ToolCallPart as ToolCallPart  # noqa: PLC0414

PIECE_BYTES = 16
"""What a piece is counted for beside its text: a token id and its place."""
LOGPROB_BYTES = 64
"""What one log-probability is counted for: about what it takes on the wire."""


@dataclass(frozen=True, slots=True)
class Piece:
    """What one step added to one answer: characters, and of which of its parts."""

    index: int
    """Which of the n answers."""
    delta: str
    """Added to the part."""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: str | None = None
    """Set in the last piece: `stop`, `tool_calls`, `length`, `cancelled`, `deadline`, `error` or `displaced`."""
    stop_reason: str | int | None = None
    """The stop text, or the client's own stop token, that ended it."""
    error: str | None = None
    error_code: str | None = None
    part: Part = TEXT
    num_bytes: int = field(init=False, repr=False, compare=False)
    """About how much a client has yet to be sent; the same for pieces alone and joined."""

    def __post_init__(self) -> None:
        """Counted once: every piece is counted when it is put into its stream and when it is taken out."""
        entries = sum([1 + len(entry.alternatives) for entry in self.logprobs]) if self.logprobs else 0
        num_bytes = len(self.delta) * 2 + PIECE_BYTES * len(self.token_ids) + LOGPROB_BYTES * entries
        object.__setattr__(self, "num_bytes", num_bytes)

    @property
    def text(self) -> str:
        """What it adds to the answer's text: nothing, where it is of another part."""
        return self.delta if isinstance(self.part, TextPart) else ""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the model requests."""

    call_id: str
    name: str
    arguments: str
    """JSON, as the model wrote it."""


def called(pieces: Iterable[Piece]) -> tuple[ToolCall, ...]:
    """The calls that these pieces of one answer make."""
    written: dict[ToolCallPart, list[str]] = {}
    for piece in pieces:
        if isinstance(piece.part, ToolCallPart):
            written.setdefault(piece.part, []).append(piece.delta)
    return tuple(ToolCall(part.call_id, part.name, "".join(deltas)) for part, deltas in written.items())


def thought(pieces: Iterable[Piece]) -> str:
    """The thoughts in these pieces."""
    return "".join(piece.delta for piece in pieces if isinstance(piece.part, ReasoningPart))


def joined(pieces: Iterable[Piece]) -> list[Piece]:
    """One piece for all that was added in a row to the same part, answer by answer as they first came."""
    by_answer: dict[int, list[Piece]] = {}
    for piece in pieces:
        by_answer.setdefault(piece.index, []).append(piece)
    return [piece for own in by_answer.values() for piece in (own if len(own) == 1 else _by_part(own))]


def _by_part(own: list[Piece]) -> list[Piece]:
    return [_join(list(run)) for _, run in groupby(own, key=attrgetter("part"))]


def _join(run: list[Piece]) -> Piece:
    last = run[-1]
    return Piece(
        index=last.index,
        delta="".join([piece.delta for piece in run]),
        token_ids=tuple([token for piece in run for token in piece.token_ids]),
        logprobs=tuple([entry for piece in run for entry in piece.logprobs]),
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        error=last.error,
        error_code=last.error_code,
        part=last.part,
    )


@dataclass(frozen=True, slots=True)
class Answer:
    """One of the n continuations of a prompt."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    stop_reason: str | int | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    error: str | None = None
    error_code: str | None = None
    reasoning: str = ""
    """What the model thought before it answered."""
    tool_calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds since the request was submitted."""

    wait_s: float
    """Until it began to run."""
    first_token_s: float
    """Until its first token."""
    total_s: float


@dataclass(frozen=True, slots=True)
class Completion:
    """A request with its answers."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    answers: tuple[Answer, ...]
    num_cached_tokens: int
    """Prompt tokens that were not computed: they came from the cache."""
    seed: int
    timings: Timings
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    num_preemptions: int = 0
    """How often it was preempted by a more urgent request."""
    num_replays: int = 0
    """How often its worker died under it."""
    num_inexact_moves: int = 0
    """How often it went on, in the middle, where other bits are computed: its text may differ for that."""
    explanation: Explanation | None = None
    """Why the next token was not found in the cache when it was admitted, where that was requested."""

    @property
    def text(self) -> str:
        """The first answer's text."""
        return self.answers[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The first answer's tokens."""
        return self.answers[0].token_ids

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """The first answer's calls."""
        return self.answers[0].tool_calls

    @property
    def finish_reason(self) -> str:
        """Why the first answer ended."""
        return self.answers[0].finish_reason

    @property
    def num_output_tokens(self) -> int:
        """Tokens of all answers."""
        return sum(len(answer.token_ids) for answer in self.answers)

    @property
    def tokens_per_s(self) -> float:
        """Output tokens per second after the first."""
        seconds = self.timings.total_s - self.timings.first_token_s
        return max(0, self.num_output_tokens - len(self.answers)) / seconds if seconds > 0 else 0.0
