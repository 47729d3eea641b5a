"""A step's items as attention takes them: flat block tables, and rows gathered into tiles that go through blocks
together, the dearest first. Rows of one item share its blocks; decoding rows are sorted by block table, so that those
with a common prefix read it together.
"""

from collections.abc import Sequence
from itertools import chain

import numpy as np

from quire.backends.host.decoder_shape import DecoderShape
from quire.backends.kernels.extension import kernels
from quire.backends.kernels.threads import num_threads
from quire.core.step import WorkItem


class StepTiles:
    """Made once for all layers with the same number of query heads per KV head."""

    __slots__ = ("max_block", "members", "num_rows", "num_tiles", "tables", "tiles")

    def __init__(self, items: Sequence[WorkItem], block_size: int, group_size: int) -> None:
        if not items:
            raise ValueError("a step has at least one item")
        flat: list[int] = []
        self.num_rows, num_blocks = 0, 0
        for item in items:
            num_rows, count, position = len(item.token_ids), len(item.block_ids), item.first_position
            _check_item(num_rows, position, count * block_size)
            flat += (self.num_rows, num_rows, position, num_blocks)
            self.num_rows, num_blocks = self.num_rows + num_rows, num_blocks + count
        self.tables = np.fromiter(chain.from_iterable(item.block_ids for item in items), np.int32, num_blocks)
        self.max_block = int(self.tables.max())
        if int(self.tables.min()) < 0:
            raise ValueError("block ids are not negative")
        self.members = np.empty((self.num_rows, 3), np.int32)
        self.tiles = np.empty((self.num_rows, 3), np.int32)
        # [first row, rows, first position, where its table begins] of each item; the kernel wants them by column.
        columns = np.array(flat, np.int32).reshape(-1, 4).T.copy()
        first, stride = columns.ctypes.data, columns.strides[0]
        self.num_tiles: int = kernels().make_tiles(
            first,
            first + stride,
            first + 2 * stride,
            first + 3 * stride,
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


def most_record_bytes(shape: DecoderShape, num_tokens: int) -> int:
    """The most that attention keeps of long sequences whose segments several threads share."""
    size: int = kernels().most_record_bytes(
        shape.num_heads, shape.num_kv_heads, shape.head_size, num_threads(), num_tokens
    )
    return size


def _check_item(num_rows: int, position: int, num_slots: int) -> None:
    if num_rows < 1 or position < 0:
        raise ValueError("every item feeds at least one token, from a position that is not negative")
    if num_slots < position + num_rows:
        raise ValueError("an item has fewer blocks than its last position needs")
