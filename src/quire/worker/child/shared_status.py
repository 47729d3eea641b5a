"""A worker's status in memory shared with its parent, so that it survives the worker's crash.

    ┌──────────┬──────────────┬───────────────────────────────┬─ ─ ─┬───────────────────────────┐
    │heartbeats│ length       │ ids of the requests in flight │     │ progress of the step      │
    └──────────┴──────────────┴───────────────────────────────┴─ ─ ─┴───────────────────────────┘

A message is sent by another thread, so a worker that aborts loses its unsent messages. Shared memory is updated at once
and can be read while the worker executes native code. The worker counts its loop's iterations (heartbeats) and writes a
step's request ids before running it; kernels count finished layers. The parent records on its own clock when either
count last changed, and reads the request ids after the worker's death. The memory has no file name on disk.
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

_HEARTBEATS = struct.Struct("=Q")
_LENGTH = struct.Struct("=Q")
_HEADER = _HEARTBEATS.size + _LENGTH.size
_STEP = struct.Struct("=QQQQQ")
"""At the end of the memory: layers done since the worker started, steps begun, tokens of the step in flight or 0,
layers done before that step, layers per step or 0."""
_LAYERS_BYTES = 8
BYTES_PER_REQUEST_ID = 40
"""Request ids are 32 characters, plus a few bytes of msgpack."""


@dataclass(frozen=True, slots=True)
class StepInFlight:
    """The progress of the step in flight."""

    number: int
    num_tokens: int
    """Tokens that the step feeds."""
    share: float
    """Fraction of its layers that are done; 0 if layers are not counted."""
    is_counted: bool = False
    """Whether kernels count its layers."""


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """The content of the shared memory."""

    num_heartbeats: int
    """Iterations of the worker's loop so far."""
    request_ids: tuple[str, ...]
    """Requests of the step in flight; empty between steps."""
    num_layers: int = 0
    """Layers done since the worker started, if kernels count them."""
    step: StepInFlight | None = None
    """None: no step is in flight."""


class SharedStatus:
    """The shared memory, used by both processes: the parent creates it, the worker inherits its descriptor."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.memory = mmap.mmap(descriptor, os.fstat(descriptor).st_size)
        self._num_heartbeats = self._num_steps = 0
        self._step_offset = len(self.memory) - _STEP.size
        self.step_layers = 0
        """Number of layers of one step; 0 if they are not counted."""

    @property
    def layers(self) -> memoryview:
        """The eight bytes in which kernels count finished layers."""
        return memoryview(self.memory)[self._step_offset : self._step_offset + _LAYERS_BYTES]

    @classmethod
    def create(cls, max_request_ids: int) -> "SharedStatus":
        """Create empty shared memory with space for `max_request_ids` request ids."""
        size = mmap.PAGESIZE + max_request_ids * BYTES_PER_REQUEST_ID
        if hasattr(os, "memfd_create"):
            descriptor = os.memfd_create("quire-flight")
        else:
            with tempfile.TemporaryFile() as file:
                descriptor = os.dup(file.fileno())
        os.ftruncate(descriptor, size)
        return cls(descriptor)

    def record_heartbeat(self) -> None:
        """Count an iteration of the loop."""
        self._num_heartbeats += 1
        _HEARTBEATS.pack_into(self.memory, 0, self._num_heartbeats)

    def record_request_ids(self, request_ids: Sequence[str]) -> None:
        """Record the requests in flight. Raises InvariantError if their ids do not fit."""
        encoded_ids = msgspec.msgpack.encode(request_ids)
        if _HEADER + len(encoded_ids) > self._step_offset:
            raise InvariantError(f"expected request ids for {len(self.memory)} bytes, got {len(encoded_ids)} bytes")
        self.memory[_HEADER : _HEADER + len(encoded_ids)] = encoded_ids
        # The length is written last, so that it never covers ids that are not written yet.
        _LENGTH.pack_into(self.memory, _HEARTBEATS.size, len(encoded_ids))

    def begin_step(self, num_tokens: int) -> None:
        """Record the start of a step."""
        self._num_steps += 1
        self._write_step(num_tokens)

    def clear_in_flight(self) -> None:
        """Record that no request is in flight."""
        _LENGTH.pack_into(self.memory, _HEARTBEATS.size, 0)
        self._write_step(0)

    def _write_step(self, num_tokens: int) -> None:
        num_layers = int.from_bytes(self.memory[self._step_offset : self._step_offset + _LAYERS_BYTES], sys.byteorder)
        _STEP.pack_into(
            self.memory, self._step_offset, num_layers, self._num_steps, num_tokens, num_layers, self.step_layers
        )

    def read(self) -> WorkerStatus:
        """Read the content. If a dying worker corrupted the request ids, they are empty."""
        num_heartbeats = _HEARTBEATS.unpack_from(self.memory, 0)[0]
        length = _LENGTH.unpack_from(self.memory, _HEARTBEATS.size)[0]
        num_layers, step = self._read_step()
        if not 0 < length <= self._step_offset - _HEADER:
            return WorkerStatus(num_heartbeats, (), num_layers, step)
        try:
            request_ids = msgspec.msgpack.decode(self.memory[_HEADER : _HEADER + length], type=tuple[str, ...])
        except (msgspec.MsgspecError, ValueError):
            request_ids = ()
        return WorkerStatus(num_heartbeats, request_ids, num_layers, step)

    def _read_step(self) -> tuple[int, StepInFlight | None]:
        num_layers, number, num_tokens, num_before, step_layers = _STEP.unpack_from(self.memory, self._step_offset)
        if not num_tokens:
            return num_layers, None
        share = min(1.0, max(0, num_layers - num_before) / step_layers) if step_layers else 0.0
        return num_layers, StepInFlight(number, num_tokens, share, is_counted=step_layers > 0)

    def close(self) -> None:
        """Release the memory and its descriptor."""
        self.memory.close()
        os.close(self.descriptor)
