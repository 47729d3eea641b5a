"""Tensors on their way from a file into panels: some outputs at a time, as bytes, never as float32.

What is read, unpacked or widened is so for a piece, then dropped.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from quire.backends.cpu.formats.weight_format import WeightFormat
from quire.errors import CheckpointError

PANEL_OUTPUTS = 16
"""Outputs of a panel. A piece, and a tensor with another behind it, has a multiple of them."""
PIECE_NUMBERS = 16 << 20
"""How many are read at a time: each piece is shared by threads that must meet behind it, so it is worth a meeting."""


class Rows(Protocol):
    """The bytes of a tensor, [out, bytes of a row]: an array, or a file that is read when it is asked."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def __getitem__(self, rows: slice, /) -> Any:
        """Some outputs, as an array of bytes."""


class RowPiece(NamedTuple):
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
    read: Callable[[int, int], RowPiece]
    """Outputs [first, end)."""
    group: int = 0
    """Inputs that share a scale, where the format leaves that open."""

    def __post_init__(self) -> None:
        self.format.row_bytes(self.num_in)
        if self.format.has_group and (self.group <= 0 or self.group % self.format.block_size):
            raise CheckpointError(
                f"expected groups of a multiple of {self.format.block_size} inputs for a weight of format "
                f"{self.format.name}, got {self.group}; choose the model with other groups",
                code="wrong_group_size",
            )

    def pieces(self) -> Iterator[tuple[int, RowPiece]]:
        """Each with its first output."""
        size = max(1, PIECE_NUMBERS // (self.num_in * PANEL_OUTPUTS)) * PANEL_OUTPUTS
        for first in range(0, self.num_out, size):
            yield first, self.read(first, min(first + size, self.num_out))
