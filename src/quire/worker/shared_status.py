"""What a worker was doing when it died: a page of memory shared with its parent, which outlives it.

    ┌──────────┬──────────────┬───────────────────────────────┐
    │ beats    │ length       │ ids of the requests in flight │
    └──────────┴──────────────┴───────────────────────────────┘

A message is in the sender's hands until a thread has passed it on, and a worker that aborts loses what it had not
passed on. Memory is written at once. The worker beats from inside its loop and names a step's requests before it runs
them; the parent sees by its own clock when there was another beat, and reads the names when the worker is gone. No
file has a name on disk.
"""

import mmap
import os
import struct
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from quire.errors import InvariantError

_BEATS = struct.Struct("=Q")
_LENGTH = struct.Struct("=Q")
_HEADER = _BEATS.size + _LENGTH.size
BYTES_PER_NAME = 40
"""Our ids are 32 characters and a few bytes of msgpack."""


@dataclass(frozen=True, slots=True)
class Flight:
    """What the page says."""

    num_beats: int
    """How often the worker's loop came round."""
    request_ids: tuple[str, ...]
    """Who was in the step that had not landed."""


class SharedStatus:
    """One side of the page. The parent makes it, the worker opens it by its inherited descriptor."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._memory = mmap.mmap(descriptor, os.fstat(descriptor).st_size)
        self._num_beats = 0

    @classmethod
    def make(cls, max_names: int) -> "SharedStatus":
        """A blank page with room for so many names."""
        size = mmap.PAGESIZE + max_names * BYTES_PER_NAME
        if hasattr(os, "memfd_create"):
            descriptor = os.memfd_create("quire-flight")
        else:
            with tempfile.TemporaryFile() as file:
                descriptor = os.dup(file.fileno())
        os.ftruncate(descriptor, size)
        return cls(descriptor)

    def beat(self) -> None:
        """The loop has come round."""
        self._num_beats += 1
        _BEATS.pack_into(self._memory, 0, self._num_beats)

    def name(self, request_ids: Sequence[str]) -> None:
        """These are in flight from now on."""
        names = msgspec.msgpack.encode(request_ids)
        if _HEADER + len(names) > len(self._memory):
            raise InvariantError(f"the shared status holds {len(self._memory)} bytes, {len(names)} of names given")
        self._memory[_HEADER : _HEADER + len(names)] = names
        # Last, so that a length is never there before its names.
        _LENGTH.pack_into(self._memory, _BEATS.size, len(names))

    def clear_in_flight(self) -> None:
        """Nobody is in flight."""
        _LENGTH.pack_into(self._memory, _BEATS.size, 0)

    def read(self) -> Flight:
        """What it says now. A page that a dying worker spoilt names nobody."""
        num_beats = _BEATS.unpack_from(self._memory, 0)[0]
        length = _LENGTH.unpack_from(self._memory, _BEATS.size)[0]
        if not 0 < length <= len(self._memory) - _HEADER:
            return Flight(num_beats, ())
        try:
            names = msgspec.msgpack.decode(self._memory[_HEADER : _HEADER + length], type=tuple[str, ...])
        except (msgspec.MsgspecError, ValueError):
            names = ()
        return Flight(num_beats, names)

    def close(self) -> None:
        """Give the descriptor and the memory back."""
        self._memory.close()
        os.close(self.descriptor)
