"""Sampling of one token per row: temperature, min-p, top-k, top-p, and inverse transform of one uniform number.

Numbers are float64 and summed in token order, so that a token depends neither on a library's summation order nor on
other rows. `kernels.sampling.draw_rows` gives the same bits; the numpy code here runs without kernels.
"""

import math
from collections.abc import Sequence
from hashlib import blake2b

import numpy as np

from quire.backends.host.exponential import exp_of
from quire.backends.kernels import extension, sampling
from quire.backends.kernels.arrays import Doubles, Floats
from quire.core.step import Sampling

NUM_CANDIDATES = 1024
"""Most likely tokens examined first for top-p; nearly always enough, and much faster than sorting a vocabulary."""
NEG_INF = float("-inf")
FRACTION_BITS = 53


def uniform(seed: int, sequence_index: int, position: int) -> float:
    """Return a number in [0, 1) determined by seed, continuation and position.

    There is no generator state, so a seed gives the same number on all backends, in any batch, after a preemption,
    and in a process that replaces a crashed one.
    """
    name = b"%d %d %d" % (seed, sequence_index, position)
    digest = blake2b(name, digest_size=8, person=b"quire-draw").digest()
    return (int.from_bytes(digest, "little") >> (64 - FRACTION_BITS)) / float(1 << FRACTION_BITS)


def draw(values: Sequence[Doubles | Floats], samplings: Sequence[Sampling]) -> list[int]:
    """Return the index of a sampled token for each row of logits; excluded tokens are -infinity.

    The index is the row's size if no token can be sampled: all are excluded, or the maximum is not finite.
    """
    uniforms = [uniform(row.seed, row.sequence_index, row.position) for row in samplings]
    if not extension.availability().is_available:
        doubles = [row.astype(np.float64) for row in values]
        return [_draw_row(*inputs) for inputs in zip(doubles, samplings, uniforms, strict=True)]
    params = [row.params for row in samplings]
    indices: list[int] = sampling.draw_rows(
        values,
        np.array([row.temperature for row in params], np.float64),
        np.array([row.min_p for row in params], np.float64),
        np.array([row.top_k for row in params], np.int64),
        np.array([row.top_p for row in params], np.float64),
        np.array(uniforms, np.float64),
    ).tolist()
    return indices


def _draw_row(values: Doubles, row: Sampling, uniform_number: float) -> int:
    params, peak = row.params, values.max(initial=NEG_INF)
    if not math.isfinite(peak):
        return len(values)
    # Subtracting the peak first keeps a tiny temperature from turning finite numbers into infinities.
    with np.errstate(over="ignore"):
        scaled = (values - peak) / params.temperature
    if params.min_p > 0.0:
        # The most likely token is at 0, so exp of a value is its probability relative to that token.
        scaled[exp_of(scaled) < params.min_p] = NEG_INF
    if 0 < params.top_k < len(scaled):
        cutoff = np.partition(scaled, len(scaled) - params.top_k)[len(scaled) - params.top_k]
        scaled[scaled < cutoff] = NEG_INF
    weights = exp_of(scaled)
    if params.top_p < 1.0:
        weights[weights < _top_p_cutoff(weights, params.top_p)] = 0.0
    cumulative = np.cumsum(weights)
    return int(np.searchsorted(cumulative, uniform_number * cumulative[-1], side="right"))


def _top_p_cutoff(weights: Doubles, top_p: float) -> float:
    """Return the smallest weight that stays: all larger weights together are less than top_p of the total."""
    top_p_mass, count = np.cumsum(weights)[-1] * top_p, min(NUM_CANDIDATES, len(weights))
    candidates = np.sort(np.partition(weights, len(weights) - count)[len(weights) - count :])[::-1]
    if np.cumsum(candidates)[-1] < top_p_mass:
        candidates = np.sort(weights)[::-1]
    mass_before = np.cumsum(candidates) - candidates
    is_kept = mass_before < top_p_mass
    num_kept = len(candidates) if is_kept.all() else max(1, int(np.argmin(is_kept)))
    return float(candidates[num_kept - 1])
