"""Keys in 8 bits, evenly: what is large in a few numbers of every key would leave the others few codes.

A score is a sum over a head's numbers of query times key, so a key's number may be divided by what the query's is
multiplied with. Numbers that turn together share a factor: then it does not matter whether it comes before or after.
The factor evens out both sides, as far as weights tell how large they become.
"""

import numpy as np
from numpy.typing import NDArray

from quire.backends.kernels.arrays import Floats

MOST = 64.0
"""A factor, over the middle of its head's."""


def factors_of(query_sizes: Floats, key_sizes: Floats) -> Floats:
    """[KV head, head size]: of [head, head size] and [KV head, head size], how large numbers tend to be."""
    num_kv_heads, head_size = key_sizes.shape
    grouped = query_sizes.reshape(num_kv_heads, -1, head_size)
    queries = _of_pairs(np.sqrt((grouped.astype(np.float64) ** 2).mean(axis=1)))
    keys = _of_pairs(key_sizes.astype(np.float64))
    found = np.sqrt(keys / queries)
    found /= np.exp(np.log(found).mean(axis=1, keepdims=True))
    limited: Floats = np.clip(found, 1 / MOST, MOST).astype(np.float32)
    return limited


def sizes_of_outputs(weight: Floats, bias: Floats | None, norm: Floats | None) -> Floats:
    """How large each output tends to be, for inputs that a norm made."""
    scaled = weight if norm is None else weight * norm
    squares = (scaled.astype(np.float64) ** 2).sum(axis=1)
    sizes: Floats = np.sqrt(squares if bias is None else squares + bias.astype(np.float64) ** 2).astype(np.float32)
    return sizes


def _of_pairs(sizes: NDArray[np.float64]) -> NDArray[np.float64]:
    low, high = np.split(sizes, 2, axis=1)
    both = np.sqrt((low**2 + high**2) / 2) + 1e-12
    return np.concatenate([both, both], axis=1)
