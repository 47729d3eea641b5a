"""Matrix products with weights packed once, in float32 or bfloat16: one packed copy for any number of rows, no padding.

A weight to pack is passed in chunks of rows, so that no second copy of the whole weight exists.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial

import numpy as np
from numpy.typing import NDArray

from quire.backends.kernels.arrays import Array, Floats, address_of, rows_of
from quire.backends.kernels.extension import availability, kernels
from quire.backends.kernels.large_pages import Arena
from quire.backends.kernels.threads import num_threads
from quire.errors import InvariantError

WEIGHT_TYPES = {"float32": 0, "bfloat16": 1}
PIECE_ROWS = 96
"""A weight chunk, except the last, has a multiple of this number of rows: a multiple of every build's panel height."""
PROBED_ROWS = (1, 2, 4, 8, 15, 16, 40, 64, 96)
PROBED_SHAPES = ((64, 96), (33, 65), (320, 160))
"""[in, out] of the weights that test quire's kernels at every start; these kernels use the same code for all sizes."""
LIBRARY_SHAPES = (*PROBED_SHAPES, (576, 1536), (1536, 576))
"""Test shapes for other libraries, which may use different code for larger weights."""


class PackedProduct:
    """A packed weight ([out, in]) of one dtype, and its bias."""

    def __init__(
        self, pieces: Iterable[Floats], shape: tuple[int, int], bias: Floats | None, dtype: str, arena: Arena
    ) -> None:
        if dtype not in WEIGHT_TYPES:
            raise InvariantError(f"expected weights in {' or '.join(WEIGHT_TYPES)}, got {dtype}")
        self.num_out, self.num_in = shape
        self._type = WEIGHT_TYPES[dtype]
        self._packed = arena.take(kernels().packed_bytes(self._type, *shape))
        self.bias = bias
        self._pack(pieces)
        self.addresses = self._packed.ctypes.data, 0 if bias is None else address_of(bias, np.float32, shape[:1])
        """Addresses of the packed weight and of its bias (0: no bias)."""
        self._call = kernels().product
        self._arguments = (self._type, *self.addresses, self.num_in, self.num_out)

    def product(self, rows: Floats, out: Floats) -> None:
        """Compute `out` = rows x weight^T + bias."""
        address, stride = rows_of(rows, np.float32, self.num_in)
        out_address, out_stride = rows_of(out, np.float32, self.num_out)
        if len(out) != len(rows):
            raise InvariantError(f"expected {len(rows)} output rows, got {len(out)}", code="wrong_output_rows")
        self._call(*self._arguments, num_threads(), address, stride, out_address, out_stride, len(rows))

    def rows(self, indices: NDArray[np.int64]) -> Floats:
        """Return these rows of the weight as float32, after rounding to the weight's dtype."""
        out = np.empty((len(indices), self.num_in), np.float32)
        if len(indices) and not 0 <= int(indices.min()) <= int(indices.max()) < self.num_out:
            message = f"expected rows 0 to {self.num_out - 1}, got {indices.max()}"
            raise InvariantError(message, code="row_out_of_range")
        address = address_of(indices, np.int64, (len(indices),))
        packed = self._type, self._packed.ctypes.data, self.num_out, self.num_in
        kernels().packed_rows(*packed, address, len(indices), out.ctypes.data)
        return out

    def _pack(self, pieces: Iterable[Floats]) -> None:
        num_out, num_in = self.num_out, self.num_in
        first = 0
        for piece in pieces:
            if first % PIECE_ROWS or len(piece) > num_out - first:
                message = f"expected a chunk that fits at row {first} of {num_out}, got {len(piece)} rows"
                raise InvariantError(message, code="rows_not_whole")
            offset = kernels().packed_bytes(self._type, first, num_in)
            address = address_of(piece, np.float32, (len(piece), num_in))
            kernels().pack(self._type, address, len(piece), num_in, self._packed.ctypes.data + offset, num_threads())
            first += len(piece)
        if first != num_out:
            raise InvariantError(f"expected {num_out} rows of a weight, got {first}", code="rows_not_whole")


def has_amx() -> bool:
    """Whether products with bfloat16 weights use AMX tile registers here."""
    uses_amx: bool = kernels().has_amx()
    return uses_amx


def round_to_dtype(numbers: Floats, dtype: str) -> Floats:
    """Return the numbers rounded to this dtype, as float32."""
    return numbers if dtype == "float32" else from_bf16(to_bf16(numbers))


def to_bf16(numbers: Floats) -> NDArray[np.uint16]:
    """Round finite float32 numbers to bfloat16, to nearest and ties to even; returns the bits as uint16."""
    bits = numbers.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def from_bf16(bits: NDArray[np.uint16]) -> Floats:
    """Convert bfloat16 bits to float32, exactly."""
    floats: Array = bits.astype(np.uint32) << 16
    return floats.view(np.float32)


Prepare = Callable[[Floats], Callable[[Floats], Floats]]
"""Function that prepares a weight and returns a function that multiplies rows with it."""


def native_product(weight: Floats, dtype: str = "float32") -> Callable[[Floats], Floats]:
    """Return a product function that uses quire's kernels and reuses one output buffer per number of rows."""
    num_out, num_in = weight.shape
    packed = PackedProduct([weight], (num_out, num_in), None, dtype, Arena())
    buffers: dict[int, Floats] = {}

    def product(rows: Floats) -> Floats:
        out = buffers.setdefault(len(rows), np.empty((len(rows), num_out), np.float32))
        packed.product(rows, out)
        return out

    return product


@cache
def probe(dtype: str) -> str | None:
    """Return None if products with weights of this dtype run, are correct, and give a row the same bits in any batch;
    otherwise the reason."""
    native = availability()
    if not native.is_available:
        return f"no native kernels: {native.reason}"

    return check_products("quire", partial(native_product, dtype=dtype), PROBED_SHAPES, PROBED_ROWS, dtype)


def check_products(
    name: str,
    prepare: Prepare,
    shapes: Sequence[tuple[int, int]],
    counts: Sequence[int],
    dtype: str = "float32",
) -> str | None:
    """Run the tests of `probe` on the products that `prepare` makes; `name` is for the returned reason."""
    random = np.random.default_rng(1)
    for num_in, num_out in shapes:
        # Numbers that the dtype represents exactly, so that rounding is not an error.
        weight = round_to_dtype(random.standard_normal((num_out, num_in), np.float32) / np.float32(num_in**0.5), dtype)
        rows = round_to_dtype(random.standard_normal((256, num_in), np.float32), dtype)
        try:
            product = prepare(weight)
            full = product(rows)
        except (AttributeError, RuntimeError) as error:
            return f"the packed product of {name} does not run here ({type(error).__name__})"
        # A few rows, without a library's matrix product, which would start a second thread pool.
        exact = [(weight * row.astype(np.float64)).sum(axis=1) for row in rows[::85]]
        if not np.allclose(full[::85], exact, atol=1e-4, rtol=1e-4):
            return f"the packed product of {name} is wrong here"
        spans = ((first, n) for n in counts for first in {0, min(5, len(rows) - n), len(rows) - n})
        if any(not np.array_equal(product(rows[first : first + n]), full[first : first + n]) for first, n in spans):
            return f"the packed product of {name} is not row-invariant here"
    return None
