"""The records of a trace, read line by line from an untrusted file.

A worker may be killed within a line; then the next worker's header follows, or nothing. So an unreadable line before a
header or the end is a truncated session, and damage anywhere else.
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
"""Maximum size of the pool that a header requests."""
BLOCK_BYTES = 128
"""Bytes of a block, besides its tokens."""
_decode: Any = msgspec.json.Decoder(AnyTraceRecord).decode


@dataclass(frozen=True, slots=True)
class TraceLine:
    """One record and its position."""

    number: int
    num_bytes_read: int
    """Bytes of the file up to this line inclusive."""
    record: AnyTraceRecord | None
    """None: the session was truncated within this line."""


def trace_lines(path: Path) -> Iterator[TraceLine]:
    """All lines of a file. Raises ReplayError if it is not a trace or is damaged."""
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
    """The record, or why the line is invalid."""


def _read(path: Path, file: BinaryIO) -> Iterator[_Read]:
    number = num_bytes = 0
    while line := file.readline(MAX_LINE_BYTES):
        number, num_bytes = number + 1, num_bytes + len(line)
        if not line.endswith(b"\n") and len(line) == MAX_LINE_BYTES:
            raise ReplayError(f"expected a line of at most {MAX_LINE_BYTES:,} bytes, line {number} of {path} has more")
        if line.strip():
            yield _Read(number, num_bytes, _record_or_why(line))


def _record_or_why(line: bytes) -> AnyTraceRecord | str:
    try:
        return _decode(line)  # type: ignore[no-any-return]
    except (msgspec.MsgspecError, QuireError, ValueError, OverflowError, RecursionError) as error:
        return str(error)


def _checked(path: Path, lines: Iterator[_Read]) -> Iterator[TraceLine]:
    held: _Read | None = None
    """An unreadable line: the next one decides between truncation and damage."""
    has_begun = False
    for line in lines:
        found = line.found
        if isinstance(found, TraceHeader):
            _check_header(path, line.number, found)
        elif held is not None:
            raise ReplayError(f"line {held.number} of the trace {path} is damaged: {held.found}")
        elif not has_begun:
            raise ReplayError(f"expected a header at the start of the trace {path}: {_why_no_header(line)}")
        if held is not None:
            yield TraceLine(held.number, held.num_bytes_read, None)
        has_begun, held = True, line if isinstance(found, str) else None
        if not isinstance(found, str):
            yield TraceLine(line.number, line.num_bytes_read, found)
    if held is not None:
        yield TraceLine(held.number, held.num_bytes_read, None)
    if not has_begun:
        raise ReplayError(f"expected a header at the start of the trace, {path} is empty")


def _why_no_header(line: _Read) -> str:
    return line.found if isinstance(line.found, str) else f"line {line.number} is another record"


def _check_header(path: Path, number: int, header: TraceHeader) -> None:
    """Reject other formats, pools that are too large, and invalid settings."""
    where = f"line {number} of the trace {path}"
    if header.quire_trace != TRACE_VERSION:
        raise ReplayError(
            f"expected a trace of format {TRACE_VERSION}, {where} begins one of format {header.quire_trace}; use quire "
            f"{header.quire}"
        )
    memory, scheduler = header.memory, header.scheduler
    num_bytes = memory.num_blocks * (4 * memory.block_size + BLOCK_BYTES) + memory.num_slots * BLOCK_BYTES
    if num_bytes > MAX_POOL_BYTES:
        raise ReplayError(
            f"expected a pool of at most {MAX_POOL_BYTES:,} bytes for a replay, {where} requests {num_bytes:,}"
        )
    try:
        scheduler.check(memory)
    except QuireError as error:
        raise ReplayError(f"{where} has invalid engine settings: {error}") from error
