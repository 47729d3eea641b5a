"""Sampling from rows of logits with the native kernels: argmax, random draws, and sums for log-probabilities."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from quire.backends.kernels.arrays import Doubles, Floats, Ids, address_of, rows_of
from quire.backends.kernels.extension import kernels
from quire.backends.kernels.threads import num_threads
from quire.errors import InvariantError


def argmax(logits: Floats) -> tuple[Ids, NDArray[np.bool_]]:
    """Return the first index of each row's maximum, and whether all numbers of the row are finite."""
    address, stride = rows_of(logits, np.float32)
    num_rows, size = logits.shape
    if size == 0:
        raise InvariantError("expected at least one number in a row of logits, got none")
    tokens, is_finite = np.empty(num_rows, np.int64), np.empty(num_rows, np.bool_)
    kernels().argmax(address, stride, tokens.ctypes.data, is_finite.ctypes.data, num_rows, size, num_threads())
    return tokens, is_finite


def draw_rows(
    rows: Sequence[Doubles | Floats],
    temperatures: Doubles,
    min_ps: Doubles,
    top_ks: Ids,
    top_ps: Doubles,
    uniforms: Doubles,
) -> Ids:
    """Sample a token per row, bit-identical to `host.drawing.draw`. Rows are float32 or float64."""
    shape, out = (len(rows),), np.empty(len(rows), np.int64)
    float_rows, double_rows = (
        np.array([address_of(row, dtype, (len(row),)) if row.dtype == dtype else 0 for row in rows], np.uint64)
        for dtype in (np.float32, np.float64)
    )
    sizes = np.array([len(row) for row in rows], np.int64)
    kernels().draw(
        float_rows.ctypes.data,
        double_rows.ctypes.data,
        sizes.ctypes.data,
        address_of(temperatures, np.float64, shape),
        address_of(min_ps, np.float64, shape),
        address_of(top_ks, np.int64, shape),
        address_of(top_ps, np.float64, shape),
        address_of(uniforms, np.float64, shape),
        out.ctypes.data,
        len(rows),
        num_threads(),
    )
    return out


def exp_totals(logits: Floats) -> tuple[Doubles, Doubles]:
    """Return each row's largest logit, and the sum of e^(logit - largest) in token order."""
    address, stride = rows_of(logits, np.float32)
    num_rows, size = logits.shape
    peaks, totals = np.empty(num_rows, np.float64), np.empty(num_rows, np.float64)
    kernels().exp_totals(address, stride, peaks.ctypes.data, totals.ctypes.data, num_rows, size, num_threads())
    return peaks, totals
