"""From numbers to one token of each row: heat, min-p, top-k, top-p, and the inversion of one uniform number.

In float64, and every sum in the order of the tokens: what is drawn must not depend on how a library sums, nor on other
rows. `kernels.sampling.draw_rows` comes to the same, bit for bit; this is its definition, and runs without kernels.
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
"""Likeliest tokens looked at first for top-p; nearly always enough, and far cheaper than sorting a vocabulary."""
NEG_INF = float("-inf")
FRACTION_BITS = 53


def uniform(seed: int, sequence_index: int, position: int) -> float:
    """A number in [0, 1), the same for ever for this seed, continuation and position.

    No generator, no state: so a seed means the same on all backends, inside any batch, after a preemption, and in the
    process that takes over from one that died.
    """
    name = b"%d %d %d" % (seed, sequence_index, position)
    digest = blake2b(name, digest_size=8, person=b"quire-draw").digest()
    return (int.from_bytes(digest, "little") >> (64 - FRACTION_BITS)) / float(1 << FRACTION_BITS)


def draw(values: Sequence[Numbers | Floats], samplings: Sequence[Sampling]) -> list[int]:
    """A place in each row of numbers, which are -infinity where a token is struck out.

    The row's size stands for none: where all are struck out, or numbers are not finite, nothing can be drawn.
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
    # Shifting by the peak first keeps a tiny temperature from making infinities of finite numbers.
    with np.errstate(over="ignore"):
        heated = (values - peak) / params.temperature
    if params.min_p > 0.0:
        # The likeliest token stands at 0, so its likelihood relative to any other is exp of their distance.
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
    """The least weight that stays: the likelier ones before it hold less than top_p of all."""
    mass, count = np.cumsum(weights)[-1] * top_p, min(NUM_CANDIDATES, len(weights))
    candidates = np.sort(np.partition(weights, len(weights) - count)[len(weights) - count :])[::-1]
    if np.cumsum(candidates)[-1] < mass:
        candidates = np.sort(weights)[::-1]
    likelier = np.cumsum(candidates) - candidates
    is_kept = likelier < mass
    num_kept = len(candidates) if is_kept.all() else max(1, int(np.argmin(is_kept)))
    return float(candidates[num_kept - 1])
