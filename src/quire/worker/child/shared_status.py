"""What a worker was doing when it died: a page of memory shared with its parent, which outlives it.

    ┌──────────┬──────────────┬───────────────────────────────┬─ ─ ─┬───────────────────────────┐
    │ beats    │ length       │ ids of the requests in flight │     │ how far the step is       │
    └──────────┴──────────────┴───────────────────────────────┴─ ─ ─┴───────────────────────────┘

A message waits in the sender until a thread has passed it on, and a worker that aborts loses what it had not passed on.
Memory is written at once, and read while the worker is in native code. The worker beats from inside its loop
and names a step's requests before it runs them; kernels count the layers they have done. The parent notes by its own
clock when there was another beat or layer, and reads the names when the worker is gone. No file has a name on disk.
"""

import mmap
import os
import struct
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from quire.errors import InvariantError

_BEATS = struct.Struct("=Q")
_LENGTH = struct.Struct("=Q")
_HEADER = _BEATS.size + _LENGTH.size
_STEP = struct.Struct("=QQQQQ")
"""At the page's end: layers done in this life, steps begun, tokens that the step in flight feeds or 0, layers done
before it, layers of a step or 0."""
_LAYERS_BYTES = 8
BYTES_PER_NAME = 40
"""Our ids are 32 characters and a few bytes of msgpack."""


@dataclass(frozen=True, slots=True)
class StepInFlight:
    """A running step."""

    number: int
    num_tokens: int
    """That it feeds."""
    share: float
    """Of its layers, done; 0 where they are not counted."""
    is_counted: bool = False
    """Kernels count its layers."""


@dataclass(frozen=True, slots=True)
class Flight:
    """The content of the page."""

    num_beats: int
    """How often the worker's loop came round."""
    request_ids: tuple[str, ...]
    """Requests of the step that had not ended."""
    num_layers: int = 0
    """Done in the worker's life, where kernels count them."""
    step: StepInFlight | None = None
    """None: no step runs."""


class SharedStatus:
    """One side of the page. The parent makes it, the worker opens it by its inherited descriptor."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.memory = mmap.mmap(descriptor, os.fstat(descriptor).st_size)
        self._num_beats = self._num_steps = 0
        self._step_at = len(self.memory) - _STEP.size
        self.step_layers = 0
        """The number of a step's layers, if they are counted."""

    @property
    def layers(self) -> memoryview:
        """Eight bytes, in which kernels count the layers they have done."""
        return memoryview(self.memory)[self._step_at : self._step_at + _LAYERS_BYTES]

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
        _BEATS.pack_into(self.memory, 0, self._num_beats)

    def name(self, request_ids: Sequence[str]) -> None:
        """These are in flight from now on."""
        names = msgspec.msgpack.encode(request_ids)
        if _HEADER + len(names) > self._step_at:
            raise InvariantError(f"the shared status holds {len(self.memory)} bytes, {len(names)} of names given")
        self.memory[_HEADER : _HEADER + len(names)] = names
        # Last, so that a length is never there before its names.
        _LENGTH.pack_into(self.memory, _BEATS.size, len(names))

    def begin_step(self, num_tokens: int) -> None:
        """A step that feeds so many is about to run."""
        self._num_steps += 1
        self._put_step(num_tokens)

    def clear_in_flight(self) -> None:
        """No request is in flight."""
        _LENGTH.pack_into(self.memory, _BEATS.size, 0)
        self._put_step(0)

    def _put_step(self, num_tokens: int) -> None:
        num_layers = int.from_bytes(self.memory[self._step_at : self._step_at + _LAYERS_BYTES], sys.byteorder)
        _STEP.pack_into(
            self.memory, self._step_at, num_layers, self._num_steps, num_tokens, num_layers, self.step_layers
        )

    def read(self) -> Flight:
        """Its content now. A page that a dying worker damaged names no request."""
        num_beats = _BEATS.unpack_from(self.memory, 0)[0]
        length = _LENGTH.unpack_from(self.memory, _BEATS.size)[0]
        num_layers, step = self._read_step()
        if not 0 < length <= self._step_at - _HEADER:
            return Flight(num_beats, (), num_layers, step)
        try:
            names = msgspec.msgpack.decode(self.memory[_HEADER : _HEADER + length], type=tuple[str, ...])
        except (msgspec.MsgspecError, ValueError):
            names = ()
        return Flight(num_beats, names, num_layers, step)

    def _read_step(self) -> tuple[int, StepInFlight | None]:
        num_layers, number, num_tokens, num_before, step_layers = _STEP.unpack_from(self.memory, self._step_at)
        if not num_tokens:
            return num_layers, None
        share = min(1.0, max(0, num_layers - num_before) / step_layers) if step_layers else 0.0
        return num_layers, StepInFlight(number, num_tokens, share, is_counted=step_layers > 0)

    def close(self) -> None:
        """Release the descriptor and the memory."""
        self.memory.close()
        os.close(self.descriptor)
