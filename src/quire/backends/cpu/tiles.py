"""A step's items as attention takes them: flat block tables, and rows gathered into tiles that go through blocks
together, the dearest first. Rows of one item share its blocks; decoding rows are sorted by block table, so that those
with a common prefix read it together.
"""

from collections.abc import Sequence
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from quire.backends.kernels.extension import kernels
from quire.core.step import WorkItem

Ints = NDArray[np.int32]


class StepTiles:
    """Made once for all layers with the same number of query heads per KV head."""

    __slots__ = ("max_block", "members", "num_rows", "num_tiles", "tables", "tiles")

    def __init__(self, items: Sequence[WorkItem], block_size: int, group_size: int) -> None:
        num_rows = np.array([len(item.token_ids) for item in items], np.int32)
        positions = np.array([item.first_position for item in items], np.int32)
        num_blocks = np.array([len(item.block_ids) for item in items], np.int32)
        _check_items(num_rows, positions, num_blocks, block_size)
        self.tables = np.fromiter(chain.from_iterable(item.block_ids for item in items), np.int32)
        self.num_rows = int(num_rows.sum())
        self.max_block = int(self.tables.max())
        if int(self.tables.min()) < 0:
            raise ValueError("block ids are not negative")
        self.members = np.empty((self.num_rows, 3), np.int32)
        self.tiles = np.empty((self.num_rows, 3), np.int32)
        first_rows, offsets = _starts(num_rows), _starts(num_blocks)
        self.num_tiles: int = kernels().make_tiles(
            first_rows.ctypes.data,
            num_rows.ctypes.data,
            positions.ctypes.data,
            offsets.ctypes.data,
            len(items),
            self.tables.ctypes.data,
            block_size,
            group_size,
            self.members.ctypes.data,
            self.tiles.ctypes.data,
        )

    @property
    def rows_of_tiles(self) -> list[list[int]]:
        """For each tile the rows in it, in the order of work; for tests and for the curious."""
        return [self.members[first : first + count, 0].tolist() for first, count, _ in self.tiles[: self.num_tiles]]


def _starts(counts: Ints) -> Ints:
    starts = np.zeros(len(counts), np.int32)
    np.cumsum(counts[:-1], out=starts[1:])
    return starts


def _check_items(num_rows: Ints, positions: Ints, num_blocks: Ints, block_size: int) -> None:
    if len(num_rows) == 0 or int(num_rows.min()) < 1 or int(positions.min()) < 0:
        raise ValueError("every item feeds at least one token, from a position that is not negative")
    if bool((num_blocks * block_size < positions + num_rows).any()):
        raise ValueError("an item has fewer blocks than its last position needs")
