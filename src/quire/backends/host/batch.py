"""A plan as flat arrays: every fed token of every item is one row, item after item.

    items      A: 3 tokens      B: 1 token   C: 5 tokens          padding
    rows       0  1  2          3            4  5  6  7  8        9

Padding rows increase the row count to one that the backend prefers; they write to the null block.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from quire.backends.kernels.arrays import Ids
from quire.core.step import WorkItem


@dataclass(frozen=True, slots=True)
class Batch:
    """All inputs of a model step except the KV itself."""

    rows: Ids
    """[4, row]: tokens, positions, blocks and slots in one array."""
    tokens: Ids
    positions: Ids
    blocks: Ids
    slots: Ids
    first_rows: tuple[int, ...]
    """First row of each item."""
    items: tuple[WorkItem, ...]


def make_batch(items: Sequence[WorkItem], block_size: int, pad: Callable[[int], int] = lambda n: n) -> Batch:
    """Flatten the items; `pad` maps a row count to the row count that is computed."""
    first_rows, num_rows = [], 0
    for item in items:
        first_rows.append(num_rows)
        num_rows += len(item.token_ids)
    flat = np.zeros((4, pad(num_rows)), np.int64)
    if num_rows == len(items):  # one token per item: faster
        tokens = [item.token_ids[0] for item in items]
        positions = [item.first_position for item in items]
        blocks = [item.block_ids[item.first_position // block_size] for item in items]
        slots = [item.first_position % block_size for item in items]
        flat[:, :num_rows] = (tokens, positions, blocks, slots)
    else:
        for first, item in zip(first_rows, items, strict=True):
            _fill(flat[:, first : first + len(item.token_ids)], item, block_size)
    return Batch(flat, flat[0], flat[1], flat[2], flat[3], tuple(first_rows), tuple(items))


def _fill(rows: Ids, item: WorkItem, block_size: int) -> None:
    positions = np.arange(item.first_position, item.first_position + len(item.token_ids))
    indices, slots = np.divmod(positions, block_size)
    rows[0], rows[1], rows[2], rows[3] = item.token_ids, positions, np.asarray(item.block_ids)[indices], slots
