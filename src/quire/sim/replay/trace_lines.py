"""Reads the records of a trace, line by line, from an untrusted file.

A killed worker may leave an incomplete line, followed by the next worker's header or by the end of the file. An
unreadable line therefore means a truncated session in these two places, and a damaged file in all others.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from quire.engine.trace_records import TRACE_VERSION, AnyTraceRecord, TraceHeader
from quire.errors import QuireError, ReplayError

MAX_LINE_BYTES = 256 << 20
"""About three times the size of a line with a prompt of ten million tokens."""
MAX_POOL_BYTES = 4 << 30
"""Maximum memory of the KV pool that a trace's header may require."""
BLOCK_BYTES = 128
"""Memory for one block, in addition to its tokens."""
_decode: Any = msgspec.json.Decoder(AnyTraceRecord).decode


@dataclass(frozen=True, slots=True)
class TraceLine:
    """One record and its position in the file."""

    number: int
    num_bytes_read: int
    """Number of bytes up to the end of this line."""
    record: AnyTraceRecord | None
    """None: the line is unreadable, because the session was truncated within this line."""
    problem: str = ""
    """Why the line is unreadable."""


def trace_lines(path: Path) -> Iterator[TraceLine]:
    """Iterate over all lines of a file. Raises ReplayError if it is not a trace or is damaged."""
    try:
        with path.open("rb") as file:
            yield from _checked_lines(path, _read_lines(path, file))
    except OSError as error:
        message = f"the trace {path} cannot be read: {error.strerror}; pass a file written by quire serve --trace"
        raise ReplayError(message, code="file_not_readable") from error


def _read_lines(path: Path, file: BinaryIO) -> Iterator[TraceLine]:
    number = num_bytes = 0
    while line := file.readline(MAX_LINE_BYTES):
        number, num_bytes = number + 1, num_bytes + len(line)
        if not line.endswith(b"\n") and len(line) == MAX_LINE_BYTES:
            raise ReplayError(f"expected lines of at most {MAX_LINE_BYTES:,} bytes, line {number} of {path} has more")
        if line.strip():
            try:
                yield TraceLine(number, num_bytes, _decode(line))
            except (msgspec.MsgspecError, QuireError, ValueError, OverflowError, RecursionError) as error:
                yield TraceLine(number, num_bytes, None, str(error))


def _checked_lines(path: Path, lines: Iterator[TraceLine]) -> Iterator[TraceLine]:
    unreadable: TraceLine | None = None
    """An unreadable line; the next line determines whether it is truncated or damaged."""
    has_begun = False
    for line in lines:
        if isinstance(line.record, TraceHeader):
            _check_header(path, line.number, line.record)
        elif unreadable is not None:
            raise ReplayError(f"line {unreadable.number} of the trace {path} is damaged: {unreadable.problem}")
        elif not has_begun:
            problem = line.problem or f"got another record in line {line.number}"
            raise ReplayError(f"expected a header at the start of the trace {path}: {problem}")
        if unreadable is not None:
            yield unreadable
        has_begun, unreadable = True, line if line.record is None else None
        if unreadable is None:
            yield line
    if unreadable is not None:
        yield unreadable
    if not has_begun:
        raise ReplayError(f"expected a header at the start of the trace {path}, got an empty file")


def _check_header(path: Path, number: int, header: TraceHeader) -> None:
    """Raise ReplayError for an unknown format, a pool that is too large, or invalid settings."""
    location = f"line {number} of the trace {path}"
    if header.quire_trace != TRACE_VERSION:
        raise ReplayError(
            f"expected a trace of format {TRACE_VERSION}, got format {header.quire_trace} in {location}; use quire "
            f"{header.quire}",
            code="unsupported_trace_version",
        )
    memory, scheduler = header.memory, header.scheduler
    num_bytes = memory.num_blocks * (4 * memory.block_size + BLOCK_BYTES) + memory.num_slots * BLOCK_BYTES
    if num_bytes > MAX_POOL_BYTES:
        raise ReplayError(
            f"expected a KV pool of at most {MAX_POOL_BYTES:,} bytes for a replay, got {num_bytes:,} in {location}"
        )
    try:
        scheduler.check(memory)
    except QuireError as error:
        raise ReplayError(f"{location} has invalid engine settings: {error}") from error
