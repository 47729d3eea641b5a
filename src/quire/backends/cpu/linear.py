"""What a packed weight is to the rest of the backend, however it is held: a format is one class with these three.

`kernels.products.PackedProduct` is the one for float32 and bfloat16.
"""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from quire.backends.kernels.arrays import Floats


class HeldRows(Protocol):
    """A matrix whose rows can be looked up: an embedding."""

    def rows(self, indices: NDArray[np.int64]) -> Floats:
        """[index, in]: rows of the weight as numbers."""
        ...


class PackedWeight(HeldRows, Protocol):
    """A weight ([out, in]) that rows are multiplied with. The bits of a row's product depend on that row alone."""

    @property
    def num_out(self) -> int:
        """Outputs of a row."""
        ...

    @property
    def reference(self) -> tuple[int, int, int, int, int]:
        """As `native/decoder.hpp` wants it: type, address, address of the bias or 0, inputs, outputs."""
        ...

    def product(self, rows: Floats, out: Floats) -> None:
        """`out` ([row, out]) = rows ([row, in]) x weight^T + bias."""
        ...
