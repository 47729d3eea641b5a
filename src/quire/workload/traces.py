"""Read traces of real traffic as visits (conversations of clients), in published formats and in quire's own.

    Mooncake   JSON lines: timestamp (ms), input_length, output_length, hash_ids: one for each 512 tokens of the
               prompt; equal ids mean equal content, so each id becomes a span (`visits.Span`)
    ShareGPT   JSON lines: arrival_time_ns, input_toks, output_toks, input_tok_ids: the prompt's token ids; without
               them the content is unknown
    quire      JSON lines: arrival_s, prompt_tokens, output_tokens; hash_ids and block_tokens, or token_ids; and
               tenant, class
    recorded   written by `quire serve --trace` (`recorded_traces`): prompts as token ids (perhaps permuted, to hide the
               text), with the original tenants and classes
    Azure      CSV: TIMESTAMP, ContextTokens, GeneratedTokens; the content is unknown, so prompts share nothing

Files are plain or .gz. To replay a trace of long prompts on a small model, all lengths are multiplied by one factor, so
that the longest request fits. Shared prefixes are scaled by the same factor.
"""

import csv
import gzip
import json
import zlib
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from datetime import datetime, timedelta
from hashlib import blake2b
from itertools import chain, pairwise
from math import isfinite
from pathlib import Path
from typing import Any, TextIO, TypeVar

from quire.workload.recorded_traces import HEADER_FIELD, recorded_requests
from quire.workload.visits import Span, Turn, Visit

HASH_TOKENS = 512
"""Number of prompt tokens per hash id in a Mooncake trace."""
SPAN_TOKENS = 16
"""Number of tokens per span, if a trace has token ids: shared prefixes are recognized in multiples of it."""
MAX_LENGTH = 1 << 24
"""Maximum tokens of a prompt or an answer; a file with a longer prompt or answer is not a trace."""
MAX_LINE_CHARS = 64 << 20
"""Enough for six million token ids. Bounded, because a small .gz file may contain a line that exceeds memory."""
MAX_TOKEN_ID = (1 << 31) - 1
CLASSES = ("high", "normal", "low")
REQUIRED_FIELDS = frozenset({"arrival_s", "prompt_tokens", "output_tokens"})
"""Fields that every row has."""
HEADER_SEARCH_CHARS = 64
"""The header field of a recorded trace must occur within this many characters of the first line."""
RowSource = TypeVar("RowSource")
AZURE_FIELDS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


class TraceError(ValueError):
    """A file is not a trace of a known format. The message has the line and the expected content."""


@dataclass(frozen=True, slots=True)
class Row:
    """One request of a trace."""

    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...] = ()
    """One id per block of the prompt. If a row has neither hash ids nor token ids, its content is unknown."""
    block_tokens: int = HASH_TOKENS
    """Number of tokens per hash id."""
    token_ids: tuple[int, ...] = ()
    """The prompt's token ids."""
    tenant: str = ""
    """Empty: the trace has none."""
    priority: str = ""
    """The class: high, normal or low; empty: the trace has none."""

    def content(self) -> tuple[list[str], int]:
        """Return a name for each block of the prompt whose content is known, and the number of tokens per block."""
        if not self.token_ids:
            return [f"hash {hash_id}" for hash_id in self.hash_ids], self.block_tokens
        packed, piece_bytes = array("I", self.token_ids).tobytes(), 4 * SPAN_TOKENS
        pieces = (packed[start : start + piece_bytes] for start in range(0, len(packed), piece_bytes))
        return [f"ids {blake2b(piece, digest_size=8).hexdigest()}" for piece in pieces], SPAN_TOKENS


@dataclass(frozen=True, slots=True)
class Trace:
    """The rows of one file, and the factor by which their lengths are multiplied (`length_scale`)."""

    name: str
    rows: tuple[Row, ...]
    length_scale: float = 1.0

    def head(self, num_rows: int) -> "Trace":
        """Return the trace with only its first rows."""
        return replace(self, rows=self.rows[:num_rows])

    def fitted(self, context_tokens: int) -> "Trace":
        """Return the trace with all lengths scaled so that the longest request has at most `context_tokens` tokens."""
        longest = max((row.prompt_tokens + row.output_tokens for row in self.rows), default=0)
        if longest <= context_tokens:
            return self
        # Two tokens are reserved, because prompt and answer have at least one token each after scaling.
        return replace(self, length_scale=self.length_scale * max(context_tokens - 2, 1) / longest)

    def spread(self) -> "Trace":
        """Return the trace with rows of equal arrival time spread evenly up to the next time, because the clocks of
        some traces tick only every few seconds. Rows with the last arrival time are unchanged."""
        times_s = sorted({row.arrival_s for row in self.rows})
        next_time_s = dict(pairwise(times_s))
        counts, rows = Counter(row.arrival_s for row in self.rows), []
        ranks: Counter[float] = Counter()
        for row in self.rows:
            tick_s = next_time_s.get(row.arrival_s, row.arrival_s) - row.arrival_s
            rows.append(replace(row, arrival_s=row.arrival_s + tick_s * ranks[row.arrival_s] / counts[row.arrival_s]))
            ranks[row.arrival_s] += 1
        return replace(self, rows=tuple(rows))

    def visits(self, speedup: float = 1.0) -> Iterator[Visit]:
        """Yield each row as a visit; with `speedup` 2 they arrive twice as fast."""
        for index, row in enumerate(self.rows):
            yield Visit(
                self.name_of(index),
                (self.turn(index),),
                priority=row.priority or "normal",
                arrival_s=row.arrival_s / speedup,
            )

    def name_of(self, index: int) -> str:
        """Return the name of the request in this row."""
        return f"{self.name}{index}"

    def turn(self, index: int) -> Turn:
        """Return the turn for the row with this index, with scaled lengths."""
        row = self.rows[index]
        prompt_tokens = max(1, int(row.prompt_tokens * self.length_scale))
        return Turn(tuple(self._spans(row, index, prompt_tokens)), max(1, int(row.output_tokens * self.length_scale)))

    def _spans(self, row: Row, index: int, prompt_tokens: int) -> Iterator[Span]:
        names, piece_tokens = row.content()
        if not names:
            yield Span(f"row {index}", prompt_tokens)
            return
        # Boundaries depend only on the position, so equal names at equal positions are equal spans in every row.
        boundaries = [int(position * piece_tokens * self.length_scale) for position in range(len(names) + 1)]
        boundaries[-1] = max(boundaries[-1], prompt_tokens)
        for position, name in enumerate(names):
            num_tokens = min(boundaries[position + 1], prompt_tokens) - boundaries[position]
            if num_tokens > 0:
                yield Span(name, num_tokens)


def read_trace(path: Path) -> Trace:
    """Read the trace in a file; its first line determines the format."""
    try:
        with _open_text(path, "r") as lines:
            rows = tuple(_parse_rows(path, _bounded_lines(path, lines)))
    except MemoryError as error:
        raise TraceError(f"the trace {path} is larger than this machine's memory; pass a part of it") from error
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
        raise TraceError(f"the trace {path} cannot be read: {error}; pass a plain text or a .gz file") from error
    if not rows:
        raise TraceError(f"expected at least one request in the trace {path}, got none")
    return Trace(path.name.partition(".")[0], _from_time_zero(rows))


def write_trace(path: Path, rows: Iterable[Row]) -> None:
    """Write rows in quire's own format, which has all fields of a row."""
    try:
        with _open_text(path, "w") as file:
            for row in rows:
                file.write(json.dumps(_as_fields(row)) + "\n")
    except OSError as error:
        raise TraceError(f"the trace {path} cannot be written: {error}; pass a file in an existing folder") from error


def _open_text(path: Path, mode: str) -> Any:
    is_gzip = path.suffix == ".gz"
    return gzip.open(path, f"{mode}t", encoding="utf-8") if is_gzip else path.open(mode, encoding="utf-8")


def _bounded_lines(path: Path, file: TextIO) -> Iterator[str]:
    """Yield the lines of a file. Raises TraceError for a line that is too long, before it is read completely."""
    number = 0
    while line := file.readline(MAX_LINE_CHARS):
        number += 1
        if len(line) == MAX_LINE_CHARS and not line.endswith("\n"):
            raise TraceError(
                f"expected lines of at most {MAX_LINE_CHARS:,} characters, got more in line {number} of {path}; "
                "pass a trace with one request on each line"
            )
        yield line


def _parse_rows(path: Path, lines: Iterator[str]) -> Iterator[Row]:
    """Yield the rows; the first line (a header or a row) determines the format."""
    first_line = next(lines, "").strip().lstrip("\ufeff")
    parse: Callable[[str], Row] = _parse_azure
    if f'"{HEADER_FIELD}"' in first_line[:HEADER_SEARCH_CHARS]:
        yield from _recorded_rows(path, chain([first_line], lines))
        return
    if tuple(first_line.split(",")) != AZURE_FIELDS:
        parse = _parser_of(path, first_line)
        yield _checked_row(path, 1, first_line, parse)
    for number, line in enumerate(lines, start=2):
        if line.strip():
            yield _checked_row(path, number, line, parse)


def _parser_of(path: Path, first_line: str) -> Callable[[str], Row]:
    """Return the parser for the JSON format of this line."""
    try:
        fields = json.loads(first_line) if first_line.startswith("{") else {}
    except (ValueError, RecursionError) as error:
        raise TraceError(f"expected a request as JSON in line 1 of {path}, got {error!r}; pass a trace") from error
    for field, parse in JSON_FORMATS.items():
        if field in fields:
            return lambda line: parse(json.loads(line))
    raise TraceError(
        "expected a trace that begins with a JSON object that has timestamp (Mooncake), input_toks (ShareGPT), "
        f"arrival_s (quire) or {HEADER_FIELD} (quire serve --trace), or with {','.join(AZURE_FIELDS)} (Azure); {path} "
        f"begins with {first_line[:60]!r}"
    )


def _recorded_rows(path: Path, lines: Iterable[str]) -> Iterator[Row]:
    """Yield the rows of a trace that `quire serve --trace` has written."""
    try:
        requests = list(recorded_requests(enumerate(lines, start=1)))
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError, RecursionError) as error:
        raise TraceError(f"the trace {path} is damaged: {error!r}; find the line with quire replay") from error
    for number, request_fields in requests:
        yield _checked_row(path, number, request_fields, _parse_own)


def _checked_row(path: Path, number: int, source: RowSource, parse: Callable[[RowSource], Row]) -> Row:
    location = f"line {number} of {path}"
    try:
        row = parse(source)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError, csv.Error) as error:
        raise TraceError(f"{location}: expected a request of the trace's format, got {error!r}; remove it") from error
    if not isfinite(row.arrival_s):
        raise TraceError(f"{location}: expected a finite arrival time, got {row.arrival_s}")
    for name, num_tokens, min_tokens in (
        ("prompt", row.prompt_tokens, 0),
        ("answer", row.output_tokens, 0),
        ("block", row.block_tokens, 1),
    ):
        if not min_tokens <= num_tokens <= MAX_LENGTH:
            raise TraceError(f"{location}: expected {min_tokens} to {MAX_LENGTH} tokens per {name}, got {num_tokens}")
    if row.token_ids and len(row.token_ids) != row.prompt_tokens:
        raise TraceError(f"{location}: expected {row.prompt_tokens} token ids for the prompt, got {len(row.token_ids)}")
    invalid = [token_id for token_id in row.token_ids if not 0 <= token_id <= MAX_TOKEN_ID]
    if invalid:
        raise TraceError(f"{location}: expected token ids from 0 to {MAX_TOKEN_ID}, got {invalid[0]}")
    if row.priority not in ("", *CLASSES):
        raise TraceError(f"{location}: expected a class of {', '.join(CLASSES)}, got {row.priority!r}")
    return row


# -- formats -----------------------------------------------------------------------------------------------------------


def _parse_mooncake(fields: Mapping[str, Any]) -> Row:
    return Row(
        arrival_s=float(fields["timestamp"]) / 1000.0,
        prompt_tokens=int(fields["input_length"]),
        output_tokens=int(fields["output_length"]),
        hash_ids=_integers(fields, "hash_ids"),
    )


def _parse_sharegpt(fields: Mapping[str, Any]) -> Row:
    """Parse a row. The recorded answer is not read, because another model generates here."""
    return Row(
        arrival_s=float(fields["arrival_time_ns"]) / 1e9,
        prompt_tokens=int(fields["input_toks"]),
        output_tokens=int(fields["output_toks"]),
        token_ids=_integers(fields, "input_tok_ids"),
    )


def _parse_own(fields: Mapping[str, Any]) -> Row:
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
    """Return the fields that `_parse_own` reads, without empty ones."""
    values = {field.name: getattr(row, field.name) for field in fields(row)} | {"class": row.priority}
    omitted = {"priority", *(() if row.hash_ids else ("block_tokens",))}
    return {name: value for name, value in values.items() if name not in omitted and (value or name in REQUIRED_FIELDS)}


JSON_FORMATS: Mapping[str, Callable[[Mapping[str, Any]], Row]] = {
    "timestamp": _parse_mooncake,
    "input_toks": _parse_sharegpt,
    "arrival_s": _parse_own,
}
"""Row parsers, by a field that only their format has."""


def _integers(fields: Mapping[str, Any], name: str) -> tuple[int, ...]:
    numbers = fields.get(name, ())
    if not isinstance(numbers, list | tuple):
        raise TypeError(f"expected {name} to be a list of integers, got {type(numbers).__name__}")
    return tuple(map(int, numbers))


def _parse_azure(line: str) -> Row:
    ((timestamp, prompt_tokens, output_tokens),) = csv.reader([line])
    seconds, _, fraction = timestamp.partition(".")
    # Azure traces have seven decimals, one more than the standard library parses.
    elapsed = datetime.fromisoformat(seconds) - datetime(1970, 1, 1) + timedelta(seconds=float(f"0.{fraction or 0}"))
    return Row(elapsed.total_seconds(), int(prompt_tokens), int(output_tokens))


def _from_time_zero(rows: Sequence[Row]) -> tuple[Row, ...]:
    """Return the rows sorted by arrival, with the first at time zero."""
    first_s = min(row.arrival_s for row in rows)
    return tuple(replace(row, arrival_s=row.arrival_s - first_s) for row in sorted(rows, key=lambda row: row.arrival_s))
