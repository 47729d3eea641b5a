"""Published traces of real traffic as visits, read from a file in the format it is published in.

    Mooncake   JSON lines: timestamp (ms), input_length, output_length, hash_ids: one per 512 tokens of the prompt;
               equal ids mean equal content, so each id is a span
    Azure      CSV: TIMESTAMP, ContextTokens, GeneratedTokens; nothing is known of content, so nothing is shared

A plain file or a .gz. A trace of long prompts meets a small model by scaling: every length by one factor, so that the
longest request fits, and what prompts have in common stays what it was.
"""

import csv
import gzip
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

from quire.workload.visits import Span, Turn, Visit

HASH_TOKENS = 512
"""Prompt tokens that one hash id of a Mooncake trace stands for."""
MAX_LENGTH = 1 << 24
"""No prompt or answer of a trace is longer; a file that says so is not a trace."""
AZURE_FIELDS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


class TraceError(ValueError):
    """A file is not a trace of a known format. The message says where and what was expected."""


@dataclass(frozen=True, slots=True)
class Row:
    """One request of a trace."""

    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...] = ()
    """Empty: nothing is known of its content."""


@dataclass(frozen=True, slots=True)
class Trace:
    """The rows of one file, and by what their lengths were multiplied."""

    name: str
    rows: tuple[Row, ...]
    factor: float = 1.0

    def head(self, num_rows: int) -> "Trace":
        """The first rows."""
        return replace(self, rows=self.rows[:num_rows])

    def fitted(self, context_tokens: int) -> "Trace":
        """The same trace with every length multiplied so that its longest request has at most so many tokens."""
        longest = max((row.prompt_tokens + row.output_tokens for row in self.rows), default=0)
        if longest <= context_tokens:
            return self
        # A prompt and an answer have at least one token each, whatever the factor.
        return replace(self, factor=self.factor * max(context_tokens - 2, 1) / longest)

    def spread(self) -> "Trace":
        """The same trace with rows of one moment spread evenly up to the next one: some clocks tick every few seconds,
        and nobody knows when between two ticks a request came. The last moment stays as it is."""
        moments = sorted({row.arrival_s for row in self.rows})
        following = dict(pairwise(moments))
        counts, rows = Counter(row.arrival_s for row in self.rows), []
        seen: Counter[float] = Counter()
        for row in self.rows:
            tick_s = following.get(row.arrival_s, row.arrival_s) - row.arrival_s
            rows.append(replace(row, arrival_s=row.arrival_s + tick_s * seen[row.arrival_s] / counts[row.arrival_s]))
            seen[row.arrival_s] += 1
        return replace(self, rows=tuple(rows))

    def visits(self, speedup: float = 1.0) -> Iterator[Visit]:
        """Each row as a visit; `speedup` 2 lets them come twice as fast."""
        for index, row in enumerate(self.rows):
            prompt_tokens = max(1, int(row.prompt_tokens * self.factor))
            spans = tuple(self._spans(row, index, prompt_tokens))
            turn = Turn(spans, max(1, int(row.output_tokens * self.factor)))
            yield Visit(f"{self.name}{index}", (turn,), arrival_s=row.arrival_s / speedup)

    def _spans(self, row: Row, index: int, prompt_tokens: int) -> Iterator[Span]:
        if not row.hash_ids:
            yield Span(f"row {index}", prompt_tokens)
            return
        # Borders depend on the place alone, so that equal ids at equal places are equal spans in every row.
        borders = [int(place * HASH_TOKENS * self.factor) for place in range(len(row.hash_ids) + 1)]
        borders[-1] = max(borders[-1], prompt_tokens)
        for place, hash_id in enumerate(row.hash_ids):
            num_tokens = min(borders[place + 1], prompt_tokens) - borders[place]
            if num_tokens > 0:
                yield Span(f"hash {hash_id}", num_tokens)


def read_trace(path: Path) -> Trace:
    """The trace in a file; its format is told by its first line."""
    try:
        with _opened(path) as lines:
            rows = tuple(_rows(path, lines))
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise TraceError(f"the trace {path} cannot be read: {error}; give a plain or a .gz file of text") from error
    if not rows:
        raise TraceError(f"a trace must have at least one request, {path} has none")
    return Trace(path.name.partition(".")[0], _from_zero(rows))


def _opened(path: Path) -> Any:
    return gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8")


def _rows(path: Path, lines: Iterable[str]) -> Iterator[Row]:
    """Rows under the header or the first line that tells what they are."""
    source = iter(lines)
    first = next(source, "").strip().lstrip("\ufeff")
    if first.startswith("{"):
        yield _row(path, 1, first, _mooncake)
        parse: Callable[[str], Row] = _mooncake
    elif tuple(first.split(",")) == AZURE_FIELDS:
        parse = _azure
    else:
        raise TraceError(
            f"a trace begins with a JSON object (Mooncake) or with {','.join(AZURE_FIELDS)} (Azure), "
            f"{path} begins with {first[:60]!r}"
        )
    for number, line in enumerate(source, start=2):
        if line.strip():
            yield _row(path, number, line, parse)


def _row(path: Path, number: int, line: str, parse: Callable[[str], Row]) -> Row:
    try:
        row = parse(line)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise TraceError(f"line {number} of {path} is not a request of a trace: {error!r}") from error
    for what, length in (("prompt", row.prompt_tokens), ("answer", row.output_tokens)):
        if not 0 <= length <= MAX_LENGTH:
            raise TraceError(f"line {number} of {path}: a {what} has 0 to {MAX_LENGTH} tokens, {length} given")
    return row


def _mooncake(line: str) -> Row:
    fields = json.loads(line)
    hash_ids = tuple(int(one) for one in fields.get("hash_ids", ()))
    return Row(
        arrival_s=float(fields["timestamp"]) / 1000.0,
        prompt_tokens=int(fields["input_length"]),
        output_tokens=int(fields["output_length"]),
        hash_ids=hash_ids,
    )


def _azure(line: str) -> Row:
    ((moment, prompt_tokens, output_tokens),) = csv.reader([line])
    whole, _, fraction = moment.partition(".")
    # Seven decimals are one more than the standard library reads.
    past = datetime.fromisoformat(whole) - datetime(1970, 1, 1) + timedelta(seconds=float(f"0.{fraction or 0}"))
    return Row(past.total_seconds(), int(prompt_tokens), int(output_tokens))


def _from_zero(rows: Sequence[Row]) -> tuple[Row, ...]:
    """In order of arrival, the first at zero."""
    first_s = min(row.arrival_s for row in rows)
    return tuple(replace(row, arrival_s=row.arrival_s - first_s) for row in sorted(rows, key=lambda row: row.arrival_s))
