"""The records of a trace, read line by line from a file that nobody believes.

A worker may be killed within a line; then the next life's header follows, or nothing. So a line that cannot be read is
where a life was cut off if a header or the end comes behind it, and damage anywhere else.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from quire.engine.trace_records import TRACE_VERSION, AnyTraceRecord, TraceHeader
from quire.errors import QuireError, ReplayError

MAX_LINE_BYTES = 256 << 20
"""A prompt of ten million tokens is a third of that."""
MAX_POOL_BYTES = 4 << 30
"""What a replay may take for the pool that a header asks for."""
BLOCK_BYTES = 128
"""Of a block, beside its tokens."""
_decode: Any = msgspec.json.Decoder(AnyTraceRecord).decode


@dataclass(frozen=True, slots=True)
class TraceLine:
    """One record, and where it stands."""

    number: int
    num_bytes_read: int
    """Of the file, with this line."""
    record: AnyTraceRecord | None
    """None: a life was cut off within this line."""


def trace_lines(path: Path) -> Iterator[TraceLine]:
    """All of a file. Raises ReplayError for what is no trace, and where one is damaged."""
    try:
        with path.open("rb") as file:
            yield from _checked(path, _read(path, file))
    except OSError as error:
        raise ReplayError(
            f"the trace {path} cannot be read: {error.strerror}; name a file of quire serve --trace"
        ) from (error)


@dataclass(frozen=True, slots=True)
class _Read:
    number: int
    num_bytes_read: int
    found: AnyTraceRecord | str
    """Or why the line is none."""


def _read(path: Path, file: BinaryIO) -> Iterator[_Read]:
    number = num_bytes = 0
    while line := file.readline(MAX_LINE_BYTES):
        number, num_bytes = number + 1, num_bytes + len(line)
        if not line.endswith(b"\n") and len(line) == MAX_LINE_BYTES:
            raise ReplayError(
                f"a line of a trace has at most {MAX_LINE_BYTES:,} bytes, line {number} of {path} has more"
            )
        if line.strip():
            yield _Read(number, num_bytes, _record_or_why(line))


def _record_or_why(line: bytes) -> AnyTraceRecord | str:
    try:
        return _decode(line)  # type: ignore[no-any-return]
    except (msgspec.MsgspecError, QuireError, ValueError, OverflowError, RecursionError) as error:
        return str(error)


def _checked(path: Path, lines: Iterator[_Read]) -> Iterator[TraceLine]:
    held: _Read | None = None
    """It cannot be read: what comes behind it tells whether a life was cut off."""
    has_begun = False
    for line in lines:
        found = line.found
        if isinstance(found, TraceHeader):
            _check_header(path, line.number, found)
        elif held is not None:
            raise ReplayError(f"line {held.number} of the trace {path} is damaged: {held.found}")
        elif not has_begun:
            raise ReplayError(f"a trace begins with a header, {path} does not: {_why_no_header(line)}")
        if held is not None:
            yield TraceLine(held.number, held.num_bytes_read, None)
        has_begun, held = True, line if isinstance(found, str) else None
        if not isinstance(found, str):
            yield TraceLine(line.number, line.num_bytes_read, found)
    if held is not None:
        yield TraceLine(held.number, held.num_bytes_read, None)
    if not has_begun:
        raise ReplayError(f"a trace begins with a header, {path} is empty")


def _why_no_header(line: _Read) -> str:
    return line.found if isinstance(line.found, str) else f"line {line.number} is another record"


def _check_header(path: Path, number: int, header: TraceHeader) -> None:
    """Refuse what this version does not know, and what would not fit here."""
    where = f"line {number} of the trace {path}"
    if header.quire_trace != TRACE_VERSION:
        raise ReplayError(
            f"traces of form {TRACE_VERSION} can be replayed here, {where} begins one of form {header.quire_trace}; "
            f"use quire {header.quire}"
        )
    memory, scheduler = header.memory, header.scheduler
    num_bytes = memory.num_blocks * (4 * memory.block_size + BLOCK_BYTES) + memory.num_slots * BLOCK_BYTES
    if num_bytes > MAX_POOL_BYTES:
        raise ReplayError(f"a replay may take {MAX_POOL_BYTES:,} bytes for a pool, {where} asks for {num_bytes:,}")
    try:
        scheduler.check(memory)
    except QuireError as error:
        raise ReplayError(f"{where} has settings that no engine has: {error}") from error
