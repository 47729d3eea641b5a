"""Matrix products with weights packed once, in float32 or bfloat16: one copy for any number of rows, no padding.

A weight comes in pieces of rows, so that no second copy of it is ever held.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import cache

import numpy as np
from numpy.typing import NDArray

from quire.backends.kernels.arrays import Array, Floats, address_of, rows_of
from quire.backends.kernels.extension import available, kernels
from quire.backends.kernels.large_pages import Arena
from quire.backends.kernels.threads import num_threads
from quire.errors import InvariantError

WEIGHT_TYPES = {"float32": 0, "bfloat16": 1}
PIECE_ROWS = 96
"""Every piece of a weight but the last has a multiple of so many rows: of what any build packs side by side."""
PROBED_ROWS = (1, 2, 4, 8, 15, 16, 40, 64, 96)
PROBED_SHAPES = ((64, 96), (33, 65), (320, 160))
"""[in, out] of weights that our own kernels are tried on at every start: they do the same at any size."""
LIBRARY_SHAPES = (*PROBED_SHAPES, (576, 1536), (1536, 576))
"""Those for a library, which may take other ways with larger ones."""


class PackedProduct:
    """A weight ([out, in]) of one type, and its bias."""

    def __init__(
        self, pieces: Iterable[Floats], shape: tuple[int, int], bias: Floats | None, dtype: str, arena: Arena
    ) -> None:
        if dtype not in WEIGHT_TYPES:
            raise InvariantError(f"expected weights in {' or '.join(WEIGHT_TYPES)}, got {dtype}")
        self._shape = shape
        self._type = WEIGHT_TYPES[dtype]
        self._packed = arena.take(kernels().packed_bytes(self._type, *shape))
        self.bias = bias
        self._pack(pieces)
        bias_address = 0 if bias is None else address_of(bias, np.float32, shape[:1])
        self._call = kernels().product
        self._arguments = (self._type, self._packed.ctypes.data, bias_address, shape[1], shape[0])

    @property
    def num_in(self) -> int:
        return self._shape[1]

    @property
    def num_out(self) -> int:
        return self._shape[0]

    @property
    def addresses(self) -> tuple[int, int]:
        """Of the packed weight, and of its bias or 0."""
        return self._arguments[1], self._arguments[2]

    def product(self, rows: Floats, out: Floats) -> None:
        """`out` = rows x weight^T + bias."""
        address, stride = rows_of(rows, np.float32, self._shape[1])
        out_address, out_stride = rows_of(out, np.float32, self._shape[0])
        if len(out) != len(rows):
            raise InvariantError(f"expected {len(rows)} output rows, got {len(out)}", code="wrong_output_rows")
        self._call(*self._arguments, num_threads(), address, stride, out_address, out_stride, len(rows))

    def rows(self, indices: NDArray[np.int64]) -> Floats:
        """Rows of the weight as numbers, as its type holds them."""
        out = np.empty((len(indices), self._shape[1]), np.float32)
        if len(indices) and not 0 <= int(indices.min()) <= int(indices.max()) < self._shape[0]:
            rule = f"expected rows 0 to {self._shape[0] - 1}, got {indices.max()}"
            raise InvariantError(rule, code="row_out_of_range")
        address = address_of(indices, np.int64, (len(indices),))
        kernels().packed_rows(self._type, self._arguments[1], *self._shape, address, len(indices), out.ctypes.data)
        return out

    def _pack(self, pieces: Iterable[Floats]) -> None:
        num_out, num_in = self._shape
        first = 0
        for piece in pieces:
            if first % PIECE_ROWS or len(piece) > num_out - first:
                rule = f"a piece of {len(piece)} rows does not fit at row {first} of {num_out}"
                raise InvariantError(rule, code="rows_not_whole")
            offset = kernels().packed_bytes(self._type, first, num_in)
            address = address_of(piece, np.float32, (len(piece), num_in))
            kernels().pack(self._type, address, len(piece), num_in, self._packed.ctypes.data + offset, num_threads())
            first += len(piece)
        if first != num_out:
            raise InvariantError(f"expected {num_out} rows of a weight, got {first}", code="rows_not_whole")


def has_amx() -> bool:
    """Whether products with bfloat16 weights are made in tile registers here."""
    has: bool = kernels().has_amx()
    return has


def held(numbers: Floats, dtype: str) -> Floats:
    """The same numbers as this type holds them."""
    return numbers if dtype == "float32" else widened_bf16(rounded_bf16(numbers))


def rounded_bf16(numbers: Floats) -> NDArray[np.uint16]:
    """The upper halves of float32, rounded to nearest and ties to even. The numbers are finite."""
    bits = numbers.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def widened_bf16(halves: NDArray[np.uint16]) -> Floats:
    """bfloat16 as float32, exactly."""
    wide: Array = halves.astype(np.uint32) << 16
    return wide.view(np.float32)


Prepare = Callable[[Floats], Callable[[Floats], Floats]]
"""From a weight to a product with it."""


@cache
def probe(dtype: str) -> str | None:
    """None if products with weights of this type run here, are right, and give a row the same bits in every company;
    else what is wrong."""
    found = available()
    if not found.is_available:
        return f"no native kernels: {found.reason}"

    def prepare(weight: Floats) -> Callable[[Floats], Floats]:
        num_out, num_in = weight.shape
        packed = PackedProduct([weight], (num_out, num_in), None, dtype, Arena())

        def product(rows: Floats) -> Floats:
            out = np.empty((len(rows), num_out), np.float32)
            packed.product(rows, out)
            return out

        return product

    return probed("quire", prepare, PROBED_SHAPES, PROBED_ROWS, dtype)


def probed(
    name: str,
    prepare: Prepare,
    shapes: Sequence[tuple[int, int]],
    counts: Sequence[int],
    dtype: str = "float32",
) -> str | None:
    """The same of any way to make products."""
    dice = np.random.default_rng(1)
    for num_in, num_out in shapes:
        # Numbers that the weights' type holds exactly, so that what it is held in is not an error.
        weight = held(dice.standard_normal((num_out, num_in), np.float32) / np.float32(num_in**0.5), dtype)
        rows = held(dice.standard_normal((256, num_in), np.float32), dtype)
        try:
            product = prepare(weight)
            whole = product(rows)
        except (AttributeError, RuntimeError) as error:
            return f"the packed product of {name} does not run here ({type(error).__name__})"
        # A few rows, summed without a library's own products: those would start a second pool of threads.
        exact = [(weight * row.astype(np.float64)).sum(axis=1) for row in rows[::85]]
        if not np.allclose(whole[::85], exact, atol=1e-4, rtol=1e-4):
            return f"the packed product of {name} is wrong here"
        places = ((first, n) for n in counts for first in {0, min(5, len(rows) - n), len(rows) - n})
        if any(not np.array_equal(product(rows[first : first + n]), whole[first : first + n]) for first, n in places):
            return f"the packed product of {name} is not row-invariant here"
    return None
