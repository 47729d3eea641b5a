"""The items of a step prepared for attention: flat block tables, and tiles, which are groups of rows that read blocks
together, the most expensive tile first. Rows of one item share its blocks; decode rows are sorted by block table, so
that rows with a common prefix are in one tile and read its blocks once."""

from collections.abc import Sequence

import numpy as np

from quire.backends.kernels.extension import kernels
from quire.backends.kernels.threads import num_threads
from quire.checkpoints.families import DecoderShape
from quire.core.step import WorkItem
from quire.errors import InvariantError

NUMBER_BYTES = 4
"""Bytes of an int32."""
MAX_BLOCK = 2**31 - 1


class StepTiles:
    """The tiles of a step, the same for all layers with this number of query heads per KV head, in one array:

    first rows, row counts, first positions, table offsets: [item] each │ tables │ members: [row, 3] │ tiles: [row, 3]
    """

    __slots__ = ("_numbers", "addresses", "max_block", "num_rows", "num_tiles")

    def __init__(self, items: Sequence[WorkItem], block_size: int, group_size: int) -> None:
        if not items:
            raise InvariantError("expected at least one item in a step, got none", code="step_without_items")
        first_rows: list[int] = []
        counts: list[int] = []
        positions: list[int] = []
        offsets: list[int] = []
        table: list[int] = []
        num_rows = 0
        for item in items:
            count = len(item.token_ids)
            _check_item(count, item.first_position, len(item.block_ids) * block_size)
            first_rows.append(num_rows)
            counts.append(count)
            positions.append(item.first_position)
            offsets.append(len(table))
            table += item.block_ids
            num_rows += count
        self.num_rows = num_rows
        numbers = self._numbers = np.empty(4 * len(items) + len(table) + 6 * num_rows, np.int32)
        header = numbers[: 4 * len(items) + len(table)]
        header[:] = [*first_rows, *counts, *positions, *offsets, *table]
        self.max_block = int(header[4 * len(items) :].view(np.uint32).max())
        if self.max_block > MAX_BLOCK:  # viewed as unsigned, a negative number is large
            raise InvariantError("expected block ids of at least 0", code="negative_block_id")
        field_bytes = NUMBER_BYTES * len(items)
        base: int = numbers.ctypes.data
        tables, members = base + 4 * field_bytes, base + NUMBER_BYTES * len(header)
        self.addresses = tables, members, members + 3 * NUMBER_BYTES * num_rows
        """Addresses of tables, members and tiles."""
        self.num_tiles: int = kernels().make_tiles(
            base, base + field_bytes, base + 2 * field_bytes, base + 3 * field_bytes, len(items), tables, block_size,
            group_size, *self.addresses[1:],
        )  # fmt: skip

    @property
    def rows_of_tiles(self) -> list[list[int]]:
        """The rows of each tile, in processing order; for tests and debugging."""
        members, tiles = self._numbers[-6 * self.num_rows :].reshape(2, self.num_rows, 3)
        return [members[first : first + count, 0].tolist() for first, count, _ in tiles[: self.num_tiles]]


def max_record_bytes(shape: DecoderShape, num_tokens: int) -> int:
    """Return the maximum memory of attention records: partial results of long sequences that several threads share."""
    size: int = kernels().most_record_bytes(
        shape.num_heads, shape.num_kv_heads, shape.head_size, num_threads(), num_tokens
    )
    return size


def _check_item(num_rows: int, position: int, num_slots: int) -> None:
    if num_rows < 1 or position < 0:
        raise InvariantError("expected at least one token for every item, from a position of at least 0")
    if num_slots < position + num_rows:
        raise InvariantError("expected blocks for all positions of an item, got too few", code="too_few_blocks")
