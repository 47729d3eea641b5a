"""Memory for what every step reads from end to end: in large pages, and each piece at the beginning of a cache line.

The system gives large pages to large pieces only, so many arrays share one. It gives them when they are first written
to: memory that is asked for and not used costs no time and nothing resident.
"""

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

LINE_BYTES = 64
"""Of a cache."""

Bytes = NDArray[np.uint8]


def zeros(num_bytes: int) -> Bytes:
    """So many bytes of zeros, beginning a cache line."""
    whole = np.zeros(num_bytes + LINE_BYTES, np.uint8)
    first = -whole.ctypes.data % LINE_BYTES
    return whole[first : first + num_bytes]


def whole_lines(num_bytes: int) -> int:
    """Up to the end of a cache line."""
    return -(-num_bytes // LINE_BYTES) * LINE_BYTES


def pieces(sizes: Sequence[int]) -> list[Bytes]:
    """Zeros of so many bytes each, all in one piece, and each at the beginning of a cache line: a vector that lies
    across two is read twice."""
    lines = [whole_lines(size) for size in sizes]
    board = zeros(sum(lines))
    return [board[first : first + size] for first, size in zip(accumulate(lines, initial=0), sizes, strict=False)]


class Arena:
    """Hands out pieces of large boards. A board lives as long as one of its pieces."""

    BOARD_BYTES = 64 << 20

    def __init__(self) -> None:
        self._free = np.empty(0, np.uint8)

    def take(self, num_bytes: int) -> Bytes:
        """So many bytes."""
        if num_bytes > len(self._free):
            self._free = zeros(max(num_bytes, self.BOARD_BYTES))
        taken, self._free = self._free[:num_bytes], self._free[whole_lines(num_bytes) :]
        return taken
