"""The result of a replay, as data and as text: recorded plans and events, and those of the replay."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from quire.engine.trace_records import PlannedRow

MAX_ROWS_SHOWN = 4
MAX_BLOCKS_SHOWN = 12
MAX_WORDS = 400
"""Longest text on one line, in characters."""


@dataclass(frozen=True, slots=True)
class TableRow:
    """A row of a plan, with its whole block table."""

    row: PlannedRow
    blocks: tuple[int, ...]

    @property
    def words(self) -> str:
        row = self.row
        known = row.num_tokens - len(row.drafts)
        end = row.first_position + row.num_tokens
        parts = [f"sequence {row.sequence_id} feeds {_counted(row.num_tokens, 'token')}, {row.first_position} to {end}"]
        if row.drafts:
            parts.append(f"the last {len(row.drafts)} drafts ({_some(row.drafts)}) behind {known}")
        parts.append(f"through blocks {_some(self.blocks)}")
        parts.append(
            "chooses nothing" if row.sampled_position is None else f"chooses the token at {row.sampled_position}"
        )
        if row.num_scored:
            parts.append(f"scores {_counted(row.num_scored, 'token')}")
        if row.state_slot:
            parts.append(f"state in slot {row.state_slot}")
        return ", ".join(parts)


@dataclass(frozen=True, slots=True)
class RowDifference:
    """The row of one sequence in a step, as recorded and as planned by the replay."""

    sequence_id: int
    request_id: str | None
    recorded: TableRow | None
    now: TableRow | None


@dataclass(frozen=True, slots=True)
class PlanDifference:
    """The first difference of a session; later plans cannot be compared."""

    line: int
    """Line number in the file."""
    step: int
    kind: str
    """`plan`, `events` or `failure`."""
    recorded: str
    now: str
    rows: tuple[RowDifference, ...] = ()
    """The rows that differ, if the difference is in the rows."""

    def lines(self) -> Iterator[str]:
        """The difference as text."""
        yield f"{KINDS[self.kind]} in step {self.step:,} (line {self.line:,})"
        for row in self.rows[:MAX_ROWS_SHOWN]:
            yield f"  {row.request_id or 'a request that has ended'}"
            yield f"    recorded  {_words_of(row.recorded)}"
            yield f"    now       {_words_of(row.now)}"
        if len(self.rows) > MAX_ROWS_SHOWN:
            yield f"  and {len(self.rows) - MAX_ROWS_SHOWN} more rows"
        if not self.rows:
            yield f"    recorded  {_plain(self.recorded)}"
            yield f"    now       {_plain(self.now)}"

    def as_json(self) -> dict[str, Any]:
        """The difference as JSON."""
        rows = [
            {
                "request_id": row.request_id,
                "sequence_id": row.sequence_id,
                "recorded": _words_of(row.recorded),
                "now": _words_of(row.now),
            }
            for row in self.rows
        ]
        return {**asdict(self), "rows": rows}


KINDS = {"plan": "another plan", "events": "other events", "failure": "the scheduler fails"}


@dataclass(frozen=True, slots=True)
class SessionReport:
    """The result of one worker's session."""

    line: int
    """Line number of the session's header."""
    quire: str
    model: str
    num_steps: int
    num_requests: int
    note: str
    """How the session ended, if it was not closed regularly."""
    difference: PlanDifference | None

    def lines(self, number: int) -> Iterator[str]:
        """The result as text."""
        counts = f"{_counted(self.num_steps, 'step')}, {_counted(self.num_requests, 'request')}"
        if self.difference is None:
            yield f"session {number}: {counts}: every plan is the same" + f"; {_plain(self.note)}" * bool(self.note)
            return
        yield f"session {number}: the same for {counts}, then"
        yield from (f"  {line}" for line in self.difference.lines())

    def as_json(self) -> dict[str, Any]:
        """The result as JSON."""
        return {**asdict(self), "difference": None if self.difference is None else self.difference.as_json()}


@dataclass(frozen=True, slots=True)
class ReplayReport:
    """The results of all sessions of a file."""

    path: str
    sessions: tuple[SessionReport, ...]

    @property
    def is_same(self) -> bool:
        return all(session.difference is None for session in self.sessions)

    @property
    def num_steps(self) -> int:
        return sum(session.num_steps for session in self.sessions)

    def lines(self) -> Iterator[str]:
        """The results as text."""
        for number, session in enumerate(self.sessions, start=1):
            yield from session.lines(number)

    def as_json(self) -> dict[str, Any]:
        """The results as JSON."""
        return {
            "file": self.path,
            "is_same": self.is_same,
            "sessions": [session.as_json() for session in self.sessions],
        }


def _words_of(row: TableRow | None) -> str:
    return "not in this step" if row is None else row.words


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _some(numbers: tuple[int, ...]) -> str:
    """The last numbers, which are the newest, as text."""
    shown = " ".join(map(str, numbers[-MAX_BLOCKS_SHOWN:]))
    return f"… {shown}" if len(numbers) > MAX_BLOCKS_SHOWN else shown or "none"


def _plain(words: str) -> str:
    """Return the text on one line, shortened, with control characters escaped."""
    shown = "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in words)
    return shown if len(shown) <= MAX_WORDS else f"{shown[:MAX_WORDS]}…"
