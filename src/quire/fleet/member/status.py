"""A member's status for its parent, each second: one line of JSON on its standard output.

    {"address": "tcp://127.0.0.1:40123", "state": "ready", "num_running": 3, ...}

Gateways do not read it: they get heartbeats on their own sockets. This is for control planes that start members, check
their health and scale them. For probes, the same line is written to a file.
"""

import os
from pathlib import Path

import msgspec

from quire.errors import ConfigError, MessageError
from quire.fleet.protocol.messages import NotNegative

MAX_LINE_BYTES = 4096
"""What a pipe takes in one piece, or not at all."""


class MemberStatus(msgspec.Struct, frozen=True):
    """A member's state and load."""

    address: str
    """Where gateways connect to it."""
    state: str
    """Its supervisor's: only one that is `ready` takes new requests."""
    num_running: NotNegative = 0
    num_waiting: NotNegative = 0
    num_uncomputed_tokens: NotNegative = 0
    """Prompt tokens that are still to be computed, of all gateways' requests."""


def encode_status(status: MemberStatus) -> bytes:
    """One line."""
    return msgspec.json.encode(status) + b"\n"


def decode_status(line: bytes) -> MemberStatus:
    """A status from its line. Raises MessageError."""
    try:
        return msgspec.json.decode(line, type=MemberStatus)
    except (msgspec.MsgspecError, ValueError) as error:
        raise MessageError(f"malformed status line of a member ({len(line)} bytes): {error}") from error


def write_status_file(file: Path, status: MemberStatus) -> None:
    """For probes, which read it and check its age: always one whole status. Raises ConfigError."""
    begun = file.with_name(f"{file.name}.new")
    try:
        begun.write_bytes(encode_status(status))
        begun.replace(file)
    except OSError as error:
        raise ConfigError(f"cannot write the status file {file}: {error}; choose a writable folder") from error


def write_status(descriptor: int, status: MemberStatus) -> None:
    """Never blocks: a parent that does not read misses a line, and the next one is newer."""
    line = encode_status(status)
    if len(line) > MAX_LINE_BYTES:
        raise MessageError(f"expected a status of up to {MAX_LINE_BYTES} bytes, got {len(line)}")
    try:
        os.write(descriptor, line)
    except (BlockingIOError, BrokenPipeError):
        return
