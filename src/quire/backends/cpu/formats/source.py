"""Tensors as sources: read from a file in chunks of outputs, as bytes and never as float32, to be packed into panels.

Reading, unpacking and conversion need memory for one chunk only. An output is a row of a weight [out, in].
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from quire.backends.cpu.formats.weight_format import WeightFormat
from quire.errors import CheckpointError

PANEL_OUTPUTS = 16
"""Outputs per panel. Chunks, and tensors that are followed by another tensor, have a multiple of this number."""
PIECE_NUMBERS = 16 << 20
"""Numbers per chunk. Threads share a chunk and synchronize after it; large chunks amortize the synchronization."""


class Rows(Protocol):
    """The bytes of a tensor, [out, bytes per row]: an array, or a file that is read on access."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def __getitem__(self, rows: slice, /) -> Any:
        """Return the bytes of some outputs."""


class RowPiece(NamedTuple):
    """A chunk of outputs: the bytes of each and, if stored separately, scales and zero points [output, group]."""

    rows: NDArray[np.uint8]
    scales: NDArray[np.float32] | None = None
    zeros: NDArray[np.uint8] | None = None


@dataclass(frozen=True, slots=True)
class Source:
    """A tensor [out, in] that can be read in a format with kernels."""

    format: WeightFormat
    num_out: int
    num_in: int
    read: Callable[[int, int], RowPiece]
    """Function that reads outputs [first, end)."""
    group: int = 0
    """Inputs per scale; 0 if the format determines that number."""

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
