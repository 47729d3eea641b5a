"""The result of a replay, as data and as text: differences of its plans and events from the recorded ones."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from quire.engine.trace_records import PlannedRow

MAX_ROWS_SHOWN = 4
MAX_BLOCKS_SHOWN = 12
MAX_TEXT_CHARS = 400
"""Maximum characters of a text on one line."""


@dataclass(frozen=True, slots=True)
class TableRow:
    """A row of a plan, with its complete block table."""

    row: PlannedRow
    blocks: tuple[int, ...]

    @property
    def text(self) -> str:
        row = self.row
        num_known = row.num_tokens - len(row.drafts)
        end = row.first_position + row.num_tokens
        parts = [f"sequence {row.sequence_id} feeds {_count(row.num_tokens, 'token')}, {row.first_position} to {end}"]
        if row.drafts:
            parts.append(f"the last {len(row.drafts)} drafts ({_last_numbers(row.drafts)}) behind {num_known}")
        parts.append(f"through blocks {_last_numbers(self.blocks)}")
        parts.append(
            "chooses nothing" if row.sampled_position is None else f"chooses the token at {row.sampled_position}"
        )
        if row.num_prompt_logprobs:
            parts.append(f"scores {_count(row.num_prompt_logprobs, 'token')}")
        if row.state_slot:
            parts.append(f"state in slot {row.state_slot}")
        return ", ".join(parts)


@dataclass(frozen=True, slots=True)
class RowDifference:
    """The row of one sequence in a step, as recorded and as planned by the replay (`now`); None: not in the step."""

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
        """Yield the difference as lines of text."""
        yield f"{KINDS[self.kind]} in step {self.step:,} (line {self.line:,})"
        for row in self.rows[:MAX_ROWS_SHOWN]:
            yield f"  {row.request_id or 'a request that has ended'}"
            yield f"    recorded  {_row_text(row.recorded)}"
            yield f"    now       {_row_text(row.now)}"
        if len(self.rows) > MAX_ROWS_SHOWN:
            yield f"  and {len(self.rows) - MAX_ROWS_SHOWN} more rows"
        if not self.rows:
            yield f"    recorded  {_one_line(self.recorded)}"
            yield f"    now       {_one_line(self.now)}"

    def as_json(self) -> dict[str, Any]:
        """Return the difference as JSON."""
        rows = [
            {
                "request_id": row.request_id,
                "sequence_id": row.sequence_id,
                "recorded": _row_text(row.recorded),
                "now": _row_text(row.now),
            }
            for row in self.rows
        ]
        return {**asdict(self), "rows": rows}


KINDS = {"plan": "different plan", "events": "different events", "failure": "the scheduler fails"}


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
    """How the session ended, if its worker was not closed regularly."""
    difference: PlanDifference | None

    def lines(self, number: int) -> Iterator[str]:
        """Yield the result as lines of text."""
        counts = f"{_count(self.num_steps, 'step')}, {_count(self.num_requests, 'request')}"
        if self.difference is None:
            yield f"session {number}: {counts}: every plan is the same" + f"; {_one_line(self.note)}" * bool(self.note)
            return
        yield f"session {number}: the same for {counts}, then"
        yield from (f"  {line}" for line in self.difference.lines())

    def as_json(self) -> dict[str, Any]:
        """Return the result as JSON."""
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
        """Yield the results as lines of text."""
        for number, session in enumerate(self.sessions, start=1):
            yield from session.lines(number)

    def as_json(self) -> dict[str, Any]:
        """Return the results as JSON."""
        return {
            "file": self.path,
            "is_same": self.is_same,
            "sessions": [session.as_json() for session in self.sessions],
        }


def _row_text(row: TableRow | None) -> str:
    return "not in this step" if row is None else row.text


def _count(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _last_numbers(numbers: tuple[int, ...]) -> str:
    """Return the last (newest) numbers as text."""
    shown = " ".join(map(str, numbers[-MAX_BLOCKS_SHOWN:]))
    return f"… {shown}" if len(numbers) > MAX_BLOCKS_SHOWN else shown or "none"


def _one_line(text: str) -> str:
    """Return the text on one line, shortened, with control characters escaped."""
    shown = "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)
    return shown if len(shown) <= MAX_TEXT_CHARS else f"{shown[:MAX_TEXT_CHARS]}…"
