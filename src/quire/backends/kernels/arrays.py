"""Checks of numpy arrays before a kernel receives their address."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.errors import InvariantError

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]
Ids = NDArray[np.int64]
Array = NDArray[Any]


def address_of(array: Array, dtype: type[np.generic], shape: tuple[int, ...] | None = None) -> int:
    """Return the address of a contiguous array. Raises InvariantError if its dtype or shape differs from these."""
    if array.dtype != dtype or not array.flags.c_contiguous or (shape is not None and array.shape != shape):
        shape_text = "" if shape is None else f" of {shape}"
        raise InvariantError(f"expected a dense array{shape_text} of {np.dtype(dtype)}, got {layout(array)}")
    return array.ctypes.data


def rows_of(array: Array, dtype: type[np.generic], width: int | None = None) -> tuple[int, int]:
    """Return address and row stride (in numbers) of an array. Raises InvariantError if its rows are not contiguous."""
    item_size = array.dtype.itemsize
    is_matching = array.dtype == dtype and array.ndim == 2 and (width is None or array.shape[1] == width)
    has_gaps = is_matching and array.size > 0 and (array.shape[1] > 1 and array.strides[1] != item_size)
    if not is_matching or has_gaps or array.strides[0] % item_size:
        contents = "contiguous" if width is None else f"{width} contiguous"
        raise InvariantError(f"expected rows of {contents} numbers of {np.dtype(dtype)} each, got {layout(array)}")
    return array.ctypes.data, array.strides[0] // item_size


def layout(array: Array) -> str:
    """Return dtype, shape and strides as text for an error message."""
    return f"{array.dtype} {array.shape} with strides {array.strides}"
