"""A member's status for its parent process: each second, one line of JSON on its standard output.

    {"address": "tcp://127.0.0.1:40123", "state": "ready", "num_running": 3, ...}

Control planes use it to start members, check their health and scale them. Gateways get heartbeats over their own
sockets instead. The same line can be written to a file for health probes.
"""

import os
from pathlib import Path

import msgspec

from quire.engine.calls import decode_message
from quire.errors import ConfigError, MessageError
from quire.fleet.protocol.messages import NotNegative

MAX_LINE_BYTES = 4096
"""Maximum size of an atomic write to a pipe (PIPE_BUF on Linux)."""


class MemberStatus(msgspec.Struct, frozen=True):
    """A member's state and load."""

    address: str
    """Address for gateways."""
    state: str
    """State of the supervisor; only a `ready` member takes new requests."""
    num_running: NotNegative = 0
    num_waiting: NotNegative = 0
    num_uncomputed_tokens: NotNegative = 0
    """Prompt tokens still to be computed, over the requests of all gateways."""


_decode = msgspec.json.Decoder(MemberStatus).decode


def encode_status(status: MemberStatus) -> bytes:
    """Encode a status as one line of JSON."""
    return msgspec.json.encode(status) + b"\n"


def decode_status(line: bytes) -> MemberStatus:
    """Decode a status line. Raises MessageError."""
    return decode_message(_decode, "status line of a member", line)


def write_status_file(file: Path, status: MemberStatus) -> None:
    """Replace the status file atomically, for probes that check its content and age. Raises ConfigError."""
    new_file = file.with_name(f"{file.name}.new")
    try:
        new_file.write_bytes(encode_status(status))
        new_file.replace(file)
    except OSError as error:
        raise ConfigError(f"cannot write the status file {file}: {error}; choose a writable folder") from error


def write_status(descriptor: int, status: MemberStatus) -> None:
    """Write a status line without blocking; drop it if the pipe is full. Raises MessageError if it is too long."""
    line = encode_status(status)
    if len(line) > MAX_LINE_BYTES:
        raise MessageError(f"expected a status of up to {MAX_LINE_BYTES} bytes, got {len(line)}")
    try:
        os.write(descriptor, line)
    except (BlockingIOError, BrokenPipeError):
        return
