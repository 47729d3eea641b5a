"""Traces of real traffic as visits, read from a file in the format it is published in; and a format of quire's own.

    Mooncake   JSON lines: timestamp (ms), input_length, output_length, hash_ids: one per 512 tokens of the prompt;
               equal ids mean equal content, so each id is a span
    ShareGPT   JSON lines: arrival_time_ns, input_toks, output_toks, input_tok_ids: the prompt itself; without it
               nothing is known of content
    quire      JSON lines: arrival_s, prompt_tokens, output_tokens; hash_ids and block_tokens, or token_ids; and
               tenant, class
    recorded   what `quire serve --trace` has written (`recorded_traces`): prompts as their token ids, permuted or not,
               and tenants and classes as they were
    Azure      CSV: TIMESTAMP, ContextTokens, GeneratedTokens; nothing is known of content, so nothing is shared

A plain file or a .gz. A trace of long prompts meets a small model by scaling: every length by one factor, so that the
longest request fits, and what prompts have in common stays what it was.
"""

import csv
import gzip
import json
import zlib
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from hashlib import blake2b
from itertools import chain, pairwise
from math import isfinite
from pathlib import Path
from typing import Any, TextIO, TypeVar

from quire.workload.recorded_traces import HEADER_FIELD, recorded_requests
from quire.workload.visits import Span, Turn, Visit

HASH_TOKENS = 512
"""Prompt tokens that one hash id of a Mooncake trace stands for."""
ID_TOKENS = 16
"""Tokens that are one span where a trace has token ids: what prompts share shows to so many tokens."""
MAX_LENGTH = 1 << 24
"""No prompt or answer of a trace is longer; a file with a longer one is not a trace."""
MAX_LINE_CHARS = 64 << 20
"""A prompt of six million token ids. A packed file of a megabyte may hold more in one line than a machine can hold."""
MAX_TOKEN_ID = (1 << 31) - 1
CLASSES = ("high", "normal", "low")
MAX_HEADER_FIELD = 64
"""Characters of a recorded trace's first line, that have its form."""
RowSource = TypeVar("RowSource")
AZURE_FIELDS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


class TraceError(ValueError):
    """A file is not a trace of a known format. The message has the line and what was expected."""


@dataclass(frozen=True, slots=True)
class Row:
    """One request of a trace."""

    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...] = ()
    """One for each block of its prompt. Without these and without token ids nothing is known of its content."""
    block_tokens: int = HASH_TOKENS
    """Tokens that one hash id stands for."""
    token_ids: tuple[int, ...] = ()
    """The prompt itself."""
    tenant: str = ""
    """Empty: the trace has none."""
    priority: str = ""
    """high, normal or low; empty: the trace has none."""

    def content(self) -> tuple[list[str], int]:
        """Names of the pieces of its prompt, as far as they are known, and how many tokens each has."""
        if not self.token_ids:
            return [f"hash {one}" for one in self.hash_ids], self.block_tokens
        packed, width = array("I", self.token_ids).tobytes(), 4 * ID_TOKENS
        pieces = (packed[start : start + width] for start in range(0, len(packed), width))
        return [f"ids {blake2b(piece, digest_size=8).hexdigest()}" for piece in pieces], ID_TOKENS


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
        and when between two ticks a request came is not recorded. The last moment stays as it is."""
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
            yield Visit(
                self.name_of(index),
                (self.turn(index),),
                priority=row.priority or "normal",
                arrival_s=row.arrival_s / speedup,
            )

    def name_of(self, index: int) -> str:
        """Of the request in this row."""
        return f"{self.name}{index}"

    def turn(self, index: int) -> Turn:
        """The turn that the row with this number stands for."""
        row = self.rows[index]
        prompt_tokens = max(1, int(row.prompt_tokens * self.factor))
        return Turn(tuple(self._spans(row, index, prompt_tokens)), max(1, int(row.output_tokens * self.factor)))

    def _spans(self, row: Row, index: int, prompt_tokens: int) -> Iterator[Span]:
        names, piece_tokens = row.content()
        if not names:
            yield Span(f"row {index}", prompt_tokens)
            return
        # Borders depend on the place alone, so that equal names at equal places are equal spans in every row.
        borders = [int(place * piece_tokens * self.factor) for place in range(len(names) + 1)]
        borders[-1] = max(borders[-1], prompt_tokens)
        for place, name in enumerate(names):
            num_tokens = min(borders[place + 1], prompt_tokens) - borders[place]
            if num_tokens > 0:
                yield Span(name, num_tokens)


def read_trace(path: Path) -> Trace:
    """The trace in a file; its format is that of its first line."""
    try:
        with _opened(path, "r") as lines:
            rows = tuple(_rows(path, _bounded(path, lines)))
    except MemoryError as error:
        raise TraceError(f"the trace {path} is larger than this machine's memory; give a part of it") from error
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
        raise TraceError(f"the trace {path} cannot be read: {error}; give a plain or a .gz file of text") from error
    if not rows:
        raise TraceError(f"expected at least one request in a trace, {path} has none")
    return Trace(path.name.partition(".")[0], _from_zero(rows))


def write_trace(path: Path, rows: Iterable[Row]) -> None:
    """In quire's own format, which has everything of a row."""
    try:
        with _opened(path, "w") as file:
            for row in rows:
                file.write(json.dumps(_as_fields(row)) + "\n")
    except OSError as error:
        raise TraceError(f"the trace {path} cannot be written: {error}; give a file in an existing folder") from error


def _opened(path: Path, mode: str) -> Any:
    is_packed = path.suffix == ".gz"
    return gzip.open(path, f"{mode}t", encoding="utf-8") if is_packed else path.open(mode, encoding="utf-8")


def _bounded(path: Path, file: TextIO) -> Iterator[str]:
    """Its lines, of which none is read any further than it may be long."""
    number = 0
    while line := file.readline(MAX_LINE_CHARS):
        number += 1
        if len(line) == MAX_LINE_CHARS and not line.endswith("\n"):
            raise TraceError(
                f"expected a line of at most {MAX_LINE_CHARS:,} characters, line {number} of {path} has more; "
                "give a trace with one request on each line"
            )
        yield line


def _rows(path: Path, source: Iterator[str]) -> Iterator[Row]:
    """Rows under the header or the first line that shows their format."""
    first = next(source, "").strip().lstrip("\ufeff")
    parse: Callable[[str], Row] = _azure
    if f'"{HEADER_FIELD}"' in first[:MAX_HEADER_FIELD]:
        yield from _recorded(path, chain([first], source))
        return
    if tuple(first.split(",")) != AZURE_FIELDS:
        parse = _parse_of(path, first)
        yield _row(path, 1, first, parse)
    for number, line in enumerate(source, start=2):
        if line.strip():
            yield _row(path, number, line, parse)


def _parse_of(path: Path, first: str) -> Callable[[str], Row]:
    """How lines like this are read."""
    try:
        fields = json.loads(first) if first.startswith("{") else {}
    except (ValueError, RecursionError) as error:
        raise TraceError(f"line 1 of {path} is not a request of a trace: {error!r}") from error
    for field, parse in JSON_FORMATS.items():
        if field in fields:
            return lambda line: parse(json.loads(line))
    raise TraceError(
        "expected a trace that begins with a JSON object that has timestamp (Mooncake), input_toks (ShareGPT), "
        f"arrival_s (quire) or {HEADER_FIELD} (quire serve --trace), or with {','.join(AZURE_FIELDS)} (Azure); {path} "
        f"begins with {first[:60]!r}"
    )


def _recorded(path: Path, lines: Iterable[str]) -> Iterator[Row]:
    """Of a trace that a server has written of itself."""
    try:
        found = list(recorded_requests(enumerate(lines, start=1)))
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError, RecursionError) as error:
        raise TraceError(f"the trace {path} is damaged: {error!r}; find the line with quire replay") from error
    for number, fields in found:
        yield _row(path, number, fields, _own)


def _row(path: Path, number: int, source: RowSource, parse: Callable[[RowSource], Row]) -> Row:
    where = f"line {number} of {path}"
    try:
        row = parse(source)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError, csv.Error) as error:
        raise TraceError(f"{where} is not a request of a trace: {error!r}") from error
    if not isfinite(row.arrival_s):
        raise TraceError(f"{where}: expected a finite arrival time, got {row.arrival_s}")
    for what, length, least in (
        ("prompt", row.prompt_tokens, 0),
        ("answer", row.output_tokens, 0),
        ("block", row.block_tokens, 1),
    ):
        if not least <= length <= MAX_LENGTH:
            raise TraceError(f"{where}: expected a {what} of {least} to {MAX_LENGTH} tokens, got {length}")
    if row.token_ids and len(row.token_ids) != row.prompt_tokens:
        raise TraceError(f"{where}: expected {row.prompt_tokens} token ids for the prompt, got {len(row.token_ids)}")
    wrong = [one for one in row.token_ids if not 0 <= one <= MAX_TOKEN_ID]
    if wrong:
        raise TraceError(f"{where}: expected token ids from 0 to {MAX_TOKEN_ID}, got {wrong[0]}")
    if row.priority not in ("", *CLASSES):
        raise TraceError(f"{where}: expected a class of {', '.join(CLASSES)}, got {row.priority!r}")
    return row


# -- formats -----------------------------------------------------------------------------------------------------------


def _mooncake(fields: Mapping[str, Any]) -> Row:
    return Row(
        arrival_s=float(fields["timestamp"]) / 1000.0,
        prompt_tokens=int(fields["input_length"]),
        output_tokens=int(fields["output_length"]),
        hash_ids=_integers(fields, "hash_ids"),
    )


def _sharegpt(fields: Mapping[str, Any]) -> Row:
    """The recorded answer is not read: another model generates here."""
    return Row(
        arrival_s=float(fields["arrival_time_ns"]) / 1e9,
        prompt_tokens=int(fields["input_toks"]),
        output_tokens=int(fields["output_toks"]),
        token_ids=_integers(fields, "input_tok_ids"),
    )


def _own(fields: Mapping[str, Any]) -> Row:
    token_ids = _integers(fields, "token_ids")
    return Row(
        arrival_s=float(fields["arrival_s"]),
        prompt_tokens=int(fields.get("prompt_tokens", len(token_ids)) if token_ids else fields["prompt_tokens"]),
        output_tokens=int(fields["output_tokens"]),
        hash_ids=_integers(fields, "hash_ids"),
        block_tokens=int(fields.get("block_tokens", HASH_TOKENS)),
        token_ids=token_ids,
        tenant=str(fields.get("tenant", "")),
        priority=str(fields.get("class", "")),
    )


def _as_fields(row: Row) -> dict[str, object]:
    """What `_own` reads, without what a row does not have."""
    fields: dict[str, object] = {
        "arrival_s": row.arrival_s,
        "prompt_tokens": row.prompt_tokens,
        "output_tokens": row.output_tokens,
    }
    if row.hash_ids:
        fields.update(hash_ids=row.hash_ids, block_tokens=row.block_tokens)
    if row.token_ids:
        fields["token_ids"] = row.token_ids
    return fields | ({"tenant": row.tenant} if row.tenant else {}) | ({"class": row.priority} if row.priority else {})


JSON_FORMATS: Mapping[str, Callable[[Mapping[str, Any]], Row]] = {
    "timestamp": _mooncake,
    "input_toks": _sharegpt,
    "arrival_s": _own,
}
"""By a field that no other format has."""


def _integers(fields: Mapping[str, Any], name: str) -> tuple[int, ...]:
    numbers = fields.get(name, ())
    if not isinstance(numbers, list | tuple):
        raise TypeError(f"expected {name} to be a list of integers, got {type(numbers).__name__}")
    return tuple(map(int, numbers))


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
