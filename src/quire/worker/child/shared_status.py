"""A worker's status in memory shared with its parent, so that it survives the worker's crash.

    ┌──────────┬──────────────┬───────────────────────────────┬─ ─ ─┬───────────────────────────┐
    │ beats    │ length       │ ids of the requests in flight │     │ progress of the step      │
    └──────────┴──────────────┴───────────────────────────────┴─ ─ ─┴───────────────────────────┘

A message is sent by another thread, so a worker that aborts loses its unsent messages. Shared memory is updated at once
and can be read while the worker executes native code. The worker counts its loop's iterations (beats) and writes a
step's request ids before running it; kernels count finished layers. The parent records on its own clock when beats or
layers last changed, and reads the request ids after the worker's death. The memory has no file name on disk.
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
"""At the end of the memory: layers done since the worker started, steps begun, tokens of the step in flight or 0,
layers done before that step, layers per step or 0."""
_LAYERS_BYTES = 8
BYTES_PER_NAME = 40
"""Request ids are 32 characters, plus a few bytes of msgpack."""


@dataclass(frozen=True, slots=True)
class StepInFlight:
    """The progress of the step in flight."""

    number: int
    num_tokens: int
    """Tokens that the step feeds."""
    share: float
    """Share of its layers that are done; 0 if layers are not counted."""
    is_counted: bool = False
    """Whether kernels count its layers."""


@dataclass(frozen=True, slots=True)
class Flight:
    """The content of the shared memory."""

    num_beats: int
    """Iterations of the worker's loop."""
    request_ids: tuple[str, ...]
    """Unfinished requests of the step."""
    num_layers: int = 0
    """Layers done since the worker started, if kernels count them."""
    step: StepInFlight | None = None
    """None: no step is in flight."""


class SharedStatus:
    """The shared memory, used by both processes: the parent creates it, the worker inherits its descriptor."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.memory = mmap.mmap(descriptor, os.fstat(descriptor).st_size)
        self._num_beats = self._num_steps = 0
        self._step_at = len(self.memory) - _STEP.size
        self.step_layers = 0
        """Number of layers of one step; 0 if they are not counted."""

    @property
    def layers(self) -> memoryview:
        """The eight bytes in which kernels count finished layers."""
        return memoryview(self.memory)[self._step_at : self._step_at + _LAYERS_BYTES]

    @classmethod
    def make(cls, max_names: int) -> "SharedStatus":
        """Create empty shared memory with space for `max_names` request ids."""
        size = mmap.PAGESIZE + max_names * BYTES_PER_NAME
        if hasattr(os, "memfd_create"):
            descriptor = os.memfd_create("quire-flight")
        else:
            with tempfile.TemporaryFile() as file:
                descriptor = os.dup(file.fileno())
        os.ftruncate(descriptor, size)
        return cls(descriptor)

    def beat(self) -> None:
        """Count an iteration of the loop."""
        self._num_beats += 1
        _BEATS.pack_into(self.memory, 0, self._num_beats)

    def name(self, request_ids: Sequence[str]) -> None:
        """Record the requests in flight. Raises InvariantError if their ids do not fit."""
        names = msgspec.msgpack.encode(request_ids)
        if _HEADER + len(names) > self._step_at:
            raise InvariantError(f"the shared status holds {len(self.memory)} bytes, {len(names)} of names given")
        self.memory[_HEADER : _HEADER + len(names)] = names
        # The length is written last, so that it never covers ids that are not written yet.
        _LENGTH.pack_into(self.memory, _BEATS.size, len(names))

    def begin_step(self, num_tokens: int) -> None:
        """Record the start of a step."""
        self._num_steps += 1
        self._put_step(num_tokens)

    def clear_in_flight(self) -> None:
        """Record that no request is in flight."""
        _LENGTH.pack_into(self.memory, _BEATS.size, 0)
        self._put_step(0)

    def _put_step(self, num_tokens: int) -> None:
        num_layers = int.from_bytes(self.memory[self._step_at : self._step_at + _LAYERS_BYTES], sys.byteorder)
        _STEP.pack_into(
            self.memory, self._step_at, num_layers, self._num_steps, num_tokens, num_layers, self.step_layers
        )

    def read(self) -> Flight:
        """Read the content. If a dying worker corrupted the request ids, they are empty."""
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
        """Release the memory and its descriptor."""
        self.memory.close()
        os.close(self.descriptor)
