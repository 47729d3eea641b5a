"""Checks of numpy arrays before a kernel receives their address."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.errors import InvariantError

Floats = NDArray[np.float32]
Numbers = NDArray[np.float64]
Ids = NDArray[np.int64]
Array = NDArray[Any]


def address_of(array: Array, dtype: type[np.generic], shape: tuple[int, ...] | None = None) -> int:
    """Return the address of a contiguous array. Raises InvariantError on another dtype or shape."""
    if array.dtype != dtype or not array.flags.c_contiguous or (shape is not None and array.shape != shape):
        wanted = "" if shape is None else f" of {shape}"
        raise InvariantError(f"expected a dense array{wanted} of {np.dtype(dtype)}, got {layout(array)}")
    return array.ctypes.data


def rows_of(array: Array, dtype: type[np.generic], width: int | None = None) -> tuple[int, int]:
    """Return address and stride (in numbers) of an array of contiguous rows. Raises InvariantError for other arrays."""
    item = array.dtype.itemsize
    is_fitting = array.dtype == dtype and array.ndim == 2 and (width is None or array.shape[1] == width)
    is_apart = is_fitting and array.size > 0 and (array.shape[1] > 1 and array.strides[1] != item)
    if not is_fitting or is_apart or array.strides[0] % item:
        numbers = "contiguous" if width is None else f"{width} contiguous"
        raise InvariantError(f"expected rows of {numbers} numbers of {np.dtype(dtype)} each, got {layout(array)}")
    return array.ctypes.data, array.strides[0] // item


def layout(array: Array) -> str:
    """Return dtype, shape and strides as text for an error message."""
    return f"{array.dtype} {array.shape} with strides {array.strides}"
