"""Tensors on their way from a file into panels: some outputs at a time, as bytes, never as float32.

A piece of a mapped file is the file itself. What must be unpacked or widened first is done for a piece, then dropped.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from quire.backends.cpu.formats.weight_format import WeightFormat
from quire.errors import CheckpointError

PANEL_OUTPUTS = 16
"""Outputs of a panel. A piece, and a tensor with another behind it, has a multiple of them."""
PIECE_NUMBERS = 2 << 20
"""How many are unpacked at a time."""


class Piece(NamedTuple):
    """Some outputs: the bytes of each, and what a format with given scales has beside them, [output, group]."""

    rows: NDArray[np.uint8]
    scales: NDArray[np.float32] | None = None
    zeros: NDArray[np.uint8] | None = None


@dataclass(frozen=True, slots=True)
class Source:
    """A tensor, [out, in], in a format that has kernels."""

    format: WeightFormat
    num_out: int
    num_in: int
    read: Callable[[int, int], Piece]
    """Outputs [first, end)."""
    group: int = 0
    """Inputs that share a scale, where the format leaves that open."""
    unpacked_at_once: int | None = PIECE_NUMBERS
    """Numbers of a piece; None: nothing is unpacked, and one piece is all."""

    def __post_init__(self) -> None:
        self.format.row_bytes(self.num_in)
        if self.format.has_group and (self.group <= 0 or self.group % self.format.block_size):
            raise CheckpointError(
                f"groups of a weight of format {self.format.name} must be a multiple of {self.format.block_size} "
                f"inputs, {self.group} are given; take the model with other groups"
            )

    def pieces(self) -> Iterator[tuple[int, Piece]]:
        """Each with its first output."""
        if self.unpacked_at_once is None:
            yield 0, self.read(0, self.num_out)
            return
        size = max(1, self.unpacked_at_once // (self.num_in * PANEL_OUTPUTS)) * PANEL_OUTPUTS
        for first in range(0, self.num_out, size):
            yield first, self.read(first, min(first + size, self.num_out))
