"""Tensors read from a file into panels: a chunk of outputs at a time, as bytes, never as float32.

Reading, unpacking and conversion need memory for one chunk only.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from quire.backends.cpu.formats.weight_format import WeightFormat
from quire.errors import CheckpointError

PANEL_OUTPUTS = 16
"""Outputs per panel. A chunk, and a tensor followed by another one, has a multiple of this number."""
PIECE_NUMBERS = 16 << 20
"""Numbers per chunk. Threads share a chunk and synchronize after it; large chunks amortize the synchronization."""


class Rows(Protocol):
    """The bytes of a tensor, [out, bytes per row]: an array, or a file that is read on access."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def __getitem__(self, rows: slice, /) -> Any:
        """Return the bytes of some outputs."""


class RowPiece(NamedTuple):
    """Some outputs: the bytes of each and, for formats with separate scales, scales and zero points [output, group]."""

    rows: NDArray[np.uint8]
    scales: NDArray[np.float32] | None = None
    zeros: NDArray[np.uint8] | None = None


@dataclass(frozen=True, slots=True)
class Source:
    """A tensor [out, in] in a format that has kernels."""

    format: WeightFormat
    num_out: int
    num_in: int
    read: Callable[[int, int], RowPiece]
    """Function that reads outputs [first, end)."""
    group: int = 0
    """Inputs per scale; 0 if the format fixes that number."""

    def __post_init__(self) -> None:
        self.format.row_bytes(self.num_in)
        if self.format.has_group and (self.group <= 0 or self.group % self.format.block_size):
            raise CheckpointError(
                f"expected groups of a multiple of {self.format.block_size} inputs for a weight of format "
                f"{self.format.name}, got {self.group}; choose the model with other groups",
                code="wrong_group_size",
            )

    def pieces(self) -> Iterator[tuple[int, RowPiece]]:
        """Yield each chunk with the index of its first output."""
        size = max(1, PIECE_NUMBERS // (self.num_in * PANEL_OUTPUTS)) * PANEL_OUTPUTS
        for first in range(0, self.num_out, size):
            yield first, self.read(first, min(first + size, self.num_out))
