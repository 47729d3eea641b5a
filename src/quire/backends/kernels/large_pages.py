"""Memory in large pages for data that every step reads in full; each piece is aligned to a cache line.

The operating system uses large pages only for large allocations, so many arrays share one. It assigns pages at the
first write: allocated but unused memory costs no time and no resident memory.
"""

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

LINE_BYTES = 64
"""Bytes per cache line."""

Bytes = NDArray[np.uint8]


def zeros(num_bytes: int) -> Bytes:
    """Return this many zero bytes, aligned to a cache line."""
    buffer = np.zeros(num_bytes + LINE_BYTES, np.uint8)
    offset = -buffer.ctypes.data % LINE_BYTES
    return buffer[offset : offset + num_bytes]


def align_to_lines(num_bytes: int) -> int:
    """Round up to whole cache lines."""
    return -(-num_bytes // LINE_BYTES) * LINE_BYTES


def allocate(sizes: Sequence[int]) -> list[Bytes]:
    """Return zeroed pieces of these sizes from one allocation, each aligned to a cache line, because a vector register
    that crosses a line needs two reads."""
    aligned = [align_to_lines(size) for size in sizes]
    buffer = zeros(sum(aligned))
    return [buffer[first : first + size] for first, size in zip(accumulate(aligned, initial=0), sizes, strict=False)]


class Arena:
    """Allocates pieces from large buffers. A buffer is freed with its last piece."""

    BUFFER_BYTES = 64 << 20

    def __init__(self) -> None:
        self._free = np.empty(0, np.uint8)

    def take(self, num_bytes: int) -> Bytes:
        """Return a zeroed array of `num_bytes` bytes."""
        if num_bytes > len(self._free):
            self._free = zeros(max(num_bytes, self.BUFFER_BYTES))
        piece, self._free = self._free[:num_bytes], self._free[align_to_lines(num_bytes) :]
        return piece
