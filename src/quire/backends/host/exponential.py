"""e^x in double precision for x <= 0, by multiplications and additions alone.

Libraries differ in the last bit of their exp, by version and by processor; a draw and a log-probability should not.
This is the arithmetic of native/sampling/softmax_filter.isa.cpp, operation by operation, and so its bits.
"""

import math

import numpy as np
from numpy.typing import NDArray

from quire.backends.kernels.arrays import Numbers

ROUND = 1.5 * 2.0**52
"""Adding it leaves the nearest integer in the low bits."""
ROUND_BITS = int(np.float64(ROUND).view(np.int64))
LOG2_E = 1.4426950408889634
LN2_HIGH, LN2_LOW = 0.6931471803691238, 1.9082149292705877e-10
"""A small integer times the first is exact."""
LEAST_EXPONENT = -746.0
"""Below it exp is 0: the least number there is is e to the -745.13."""
DEGREE = 13
INVERSE_FACTORIALS = [1.0 / math.factorial(at) for at in range(DEGREE + 1)]


def exp_of(values: Numbers) -> Numbers:
    """Of each number; exactly 1 at 0, and 0 for -infinity."""
    is_zero = values < LEAST_EXPONENT
    x = np.where(is_zero, 0.0, values)
    shifted = x * LOG2_E + ROUND
    n = shifted - ROUND
    r = (x - n * LN2_HIGH) - n * LN2_LOW
    y = np.full_like(r, INVERSE_FACTORIALS[DEGREE])
    for at in range(DEGREE - 1, -1, -1):
        y *= r
        y += INVERSE_FACTORIALS[at]
    whole = shifted.view(np.int64) - ROUND_BITS
    # In two halves: the smallest results have an exponent that no normal number has.
    half = whole >> 1
    y *= _power_of_two(half)
    y *= _power_of_two(whole - half)
    y[is_zero] = 0.0
    return y


def _power_of_two(exponents: NDArray[np.int64]) -> Numbers:
    return ((exponents + 1023) << 52).view(np.float64)
