"""Sampling of one token per row: temperature, min-p, top-k, top-p, and inverse transform of one uniform number.

Everything is float64 and summed in token order, so that a token depends neither on a library's summation order nor on
other rows. `kernels.sampling.draw_rows` is bit-identical; this definition runs without kernels.
"""

import math
from collections.abc import Sequence
from hashlib import blake2b

import numpy as np

from quire.backends.host.exponential import exp_of
from quire.backends.kernels import extension, sampling
from quire.backends.kernels.arrays import Floats, Numbers
from quire.core.step import Sampling

NUM_CANDIDATES = 1024
"""Most likely tokens considered first for top-p; nearly always enough, and far cheaper than sorting a vocabulary."""
NEG_INF = float("-inf")
FRACTION_BITS = 53


def uniform(seed: int, sequence_index: int, position: int) -> float:
    """Return a number in [0, 1) determined by seed, continuation and position.

    There is no generator and no state, so a seed gives the same number on all backends, in any batch, after a
    preemption, and in a process that takes over from a crashed one.
    """
    name = b"%d %d %d" % (seed, sequence_index, position)
    digest = blake2b(name, digest_size=8, person=b"quire-draw").digest()
    return (int.from_bytes(digest, "little") >> (64 - FRACTION_BITS)) / float(1 << FRACTION_BITS)


def draw(values: Sequence[Numbers | Floats], samplings: Sequence[Sampling]) -> list[int]:
    """Return one index per row; excluded tokens are -infinity.

    The index is the row's size if nothing can be drawn: all tokens are excluded, or the maximum is not finite.
    """
    numbers = [uniform(one.seed, one.sequence_index, one.position) for one in samplings]
    if not extension.available().is_available:
        wide = [row.astype(np.float64) for row in values]
        return [_draw_row(row, one, number) for row, one, number in zip(wide, samplings, numbers, strict=True)]
    params = [one.params for one in samplings]
    drawn: list[int] = sampling.draw_rows(
        values,
        np.array([one.temperature for one in params], np.float64),
        np.array([one.min_p for one in params], np.float64),
        np.array([one.top_k for one in params], np.int64),
        np.array([one.top_p for one in params], np.float64),
        np.array(numbers, np.float64),
    ).tolist()
    return drawn


def _draw_row(values: Numbers, row: Sampling, number: float) -> int:
    params, peak = row.params, values.max(initial=NEG_INF)
    if not math.isfinite(peak):
        return len(values)
    # Subtracting the peak first keeps a tiny temperature from turning finite numbers into infinities.
    with np.errstate(over="ignore"):
        heated = (values - peak) / params.temperature
    if params.min_p > 0.0:
        # The most likely token is at 0, so exp of a value is its probability relative to that token.
        heated[exp_of(heated) < params.min_p] = NEG_INF
    if 0 < params.top_k < len(heated):
        border = np.partition(heated, len(heated) - params.top_k)[len(heated) - params.top_k]
        heated[heated < border] = NEG_INF
    weights = exp_of(heated)
    if params.top_p < 1.0:
        weights[weights < _top_p_border(weights, params.top_p)] = 0.0
    cumulated = np.cumsum(weights)
    return int(np.searchsorted(cumulated, number * cumulated[-1], side="right"))


def _top_p_border(weights: Numbers, top_p: float) -> float:
    """Return the smallest kept weight: all more likely tokens together have less than top_p of the total."""
    mass, count = np.cumsum(weights)[-1] * top_p, min(NUM_CANDIDATES, len(weights))
    candidates = np.sort(np.partition(weights, len(weights) - count)[len(weights) - count :])[::-1]
    if np.cumsum(candidates)[-1] < mass:
        candidates = np.sort(weights)[::-1]
    likelier = np.cumsum(candidates) - candidates
    is_kept = likelier < mass
    num_kept = len(candidates) if is_kept.all() else max(1, int(np.argmin(is_kept)))
    return float(candidates[num_kept - 1])
