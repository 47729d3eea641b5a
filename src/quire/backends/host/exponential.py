"""e^x in double precision for x <= 0, by multiplications and additions alone.

Library implementations of exp differ in the last bit by version and processor; sampling and log-probabilities must not.
The arithmetic equals native/sampling/softmax_filter.isa.cpp operation by operation, with identical result bits.
"""

import math

import numpy as np
from numpy.typing import NDArray

from quire.backends.kernels.arrays import Doubles

ROUND = 1.5 * 2.0**52
"""Adding this number to a double moves the nearest integer into the low bits."""
ROUND_BITS = int(np.float64(ROUND).view(np.int64))
LOG2_E = 1.4426950408889634
LN2_HIGH, LN2_LOW = 0.6931471803691238, 1.9082149292705877e-10
"""ln 2 in two parts; LN2_HIGH times a small integer is exact."""
MIN_EXPONENT = -746.0
"""Below this exponent the result is 0: the smallest positive double is about e^-745.13."""
DEGREE = 13
INVERSE_FACTORIALS = [1.0 / math.factorial(n) for n in range(DEGREE + 1)]


def exp_of(values: Doubles) -> Doubles:
    """Return e^x of each number: exactly 1 at 0, and 0 at -infinity."""
    is_zero = values < MIN_EXPONENT
    x = np.where(is_zero, 0.0, values)
    shifted = x * LOG2_E + ROUND
    n = shifted - ROUND
    r = (x - n * LN2_HIGH) - n * LN2_LOW
    y = np.full_like(r, INVERSE_FACTORIALS[DEGREE])
    for degree in range(DEGREE - 1, -1, -1):
        y *= r
        y += INVERSE_FACTORIALS[degree]
    exponent = shifted.view(np.int64) - ROUND_BITS
    # In two halves, because the smallest results have an exponent below that of any normal number.
    half_exponent = exponent >> 1
    y *= _power_of_two(half_exponent)
    y *= _power_of_two(exponent - half_exponent)
    y[is_zero] = 0.0
    return y


def _power_of_two(exponents: NDArray[np.int64]) -> Doubles:
    return ((exponents + 1023) << 52).view(np.float64)
