"""The rows of a batch, grouped for attention.

    items      A: 3 tokens      B: 1 token   C: 5 tokens
    rows       0  1  2          3            4  5  6  7  8
    tiles      [ 0 1 2 . ]      [ 3 ]        [ 4 5 6 7 ][ 8 . . . ]

Rows of one item are grouped into **tiles** that attend to the same blocks; a tile with one of its blocks is a **pair**.
Tiles are sorted by block count, largest first, and pairs by block number. The tiles that have a block with some
number are then a leading slice, and sums over blocks run in block-table order without a branch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray

from quire.backends.host.batch import Batch
from quire.backends.host.block_store import LayerShape
from quire.core.step import WorkItem

TILE_ROWS = 32
"""Rows per tile of an item that feeds several tokens."""
MAX_ROWS_PER_CALL = 4096
"""Maximum tile rows, summed over all pairs of one call: limits the memory of attention. A single tile may exceed it."""


@dataclass(frozen=True, slots=True)
class Tiles:
    """Tiles of equal size and their pairs with blocks (`pair_tile`, `pair_block`), few enough for one call."""

    rows: torch.Tensor
    """[tile, row of tile] -> row of the step. A partial tile repeats its last row."""
    pair_tile: torch.Tensor
    pair_block: torch.Tensor
    num_active: tuple[int, ...]
    """For each block number, the number of tiles with such a block."""
    is_masked: torch.Tensor
    """[pair, row of tile, slot]: true if the row must not attend to the slot."""
    partial_pairs: torch.Tensor
    """Pairs whose block has slots after the tile's last position."""
    is_unwritten: torch.Tensor
    """[partial pair, slot]: the slots after the tile's last position."""
    real_rows: torch.Tensor
    """Rows of the step that the tiles compute, without repetitions."""
    real_indices: torch.Tensor
    """Index of each of `real_rows` in the flattened tiles."""


TilesByWindow = dict[int | None, tuple[Tiles, ...]]
"""Sliding window (None: no window) -> the tiles for layers with this window."""


class Tiler:
    """Groups a batch's rows into tiles, for one model and one block size."""

    def __init__(
        self,
        block_size: int,
        shapes: Sequence[LayerShape],
        windows: Sequence[int | None],
        group_size: int,
        device: torch.device,
    ) -> None:
        self._block_size = block_size
        self._windows = tuple(dict.fromkeys(windows))
        self._single_tile_rows = max(single_tile_rows(block_size, shape, group_size) for shape in set(shapes))
        self._device = device

    def tiles(self, batch: Batch) -> TilesByWindow:
        """Return the tiles of this batch for each window of the model."""
        return {window: self._tiles(batch.items, batch.first_rows, window) for window in self._windows}

    def _tiles(self, items: Sequence[WorkItem], first_rows: Sequence[int], window: int | None) -> tuple[Tiles, ...]:
        starts = list(zip(items, first_rows, strict=True))
        single_rows = [_Tile(item, row, 0, 1) for item, row in starts if len(item.token_ids) == 1]
        chunks = [
            _Tile(item, row, first, min(TILE_ROWS, len(item.token_ids) - first))
            for item, row in starts
            if len(item.token_ids) > 1
            for first in range(0, len(item.token_ids), TILE_ROWS)
        ]
        calls = []
        for tile_rows, tiles in ((self._single_tile_rows, single_rows), (TILE_ROWS, chunks)):
            ordered = sorted(tiles, key=lambda tile: -tile.num_blocks(self._block_size, window))
            num_pairs = [tile.num_blocks(self._block_size, window) for tile in ordered]
            for group in _groups(ordered, num_pairs, MAX_ROWS_PER_CALL // max(8, tile_rows)):
                calls.append(self._tiles_of_call(group, tile_rows, window))
        return tuple(calls)

    def _tiles_of_call(self, tiles: "Sequence[_Tile]", tile_rows: int, window: int | None) -> Tiles:
        size = self._block_size
        row_indices = np.arange(tile_rows)
        counts = np.array([tile.num_rows for tile in tiles])
        offsets = np.minimum(row_indices, counts[:, None] - 1)
        rows = np.array([tile.first_row for tile in tiles])[:, None] + offsets
        positions = np.array([tile.first_position for tile in tiles])[:, None] + offsets
        firsts = np.array([tile.first_block(size, window) for tile in tiles])
        num_blocks = np.array([tile.num_blocks(size, window) for tile in tiles])
        num_active = tuple(int((num_blocks > number).sum()) for number in range(int(num_blocks.max())))
        pair_tile = np.concatenate([np.arange(active) for active in num_active])
        pair_number = np.repeat(np.arange(len(num_active)), num_active) + firsts[pair_tile]
        pair_block = np.array(
            [tiles[tile].item.block_ids[number] for tile, number in zip(pair_tile, pair_number, strict=True)]
        )
        slots = pair_number[:, None] * size + np.arange(size)
        row_positions = positions[pair_tile]
        is_masked = slots[:, None, :] > row_positions[:, :, None]
        if window is not None:
            is_masked |= slots[:, None, :] <= row_positions[:, :, None] - window
        is_unwritten = slots > positions[pair_tile].max(axis=1, keepdims=True)
        partial_pairs = np.flatnonzero(is_unwritten.any(axis=1))
        is_real = row_indices < counts[:, None]
        return Tiles(
            rows=self._tensor(rows),
            pair_tile=self._tensor(pair_tile),
            pair_block=self._tensor(pair_block),
            num_active=num_active,
            is_masked=self._tensor(is_masked),
            partial_pairs=self._tensor(partial_pairs),
            is_unwritten=self._tensor(is_unwritten[partial_pairs]),
            real_rows=self._tensor(rows[is_real]),
            real_indices=self._tensor(np.flatnonzero(is_real)),
        )

    def _tensor(self, array: NDArray[np.int64] | NDArray[np.bool_]) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device)


@cache
def single_tile_rows(block_size: int, shape: LayerShape, group_size: int) -> int:
    """Return how often to repeat a single decode row so that it gets the same bits as in a full tile.

    A library may use different code for small products, so each count is tested; a full tile is always right.
    """
    generator = torch.Generator().manual_seed(1)

    def numbers(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(4, rows, columns, generator=generator)

    pairs = [
        (numbers(TILE_ROWS * group_size, shape.key_size), numbers(shape.key_size, block_size)),
        (numbers(TILE_ROWS * group_size, block_size), numbers(block_size, shape.value_size)),
    ]
    for count in (1, 2, 4, 8, 16):
        rows = count * group_size
        if rows > 1 and all(
            torch.equal(
                torch.bmm(tile[:, first : first + rows], block), torch.bmm(tile, block)[:, first : first + rows]
            )
            for tile, block in pairs
            for first in (0, (TILE_ROWS - count) * group_size)
        ):
            return count
    return TILE_ROWS


@dataclass(frozen=True, slots=True)
class _Tile:
    """Consecutive rows of one item."""

    item: WorkItem
    item_row: int
    first: int
    num_rows: int

    @property
    def first_row(self) -> int:
        return self.item_row + self.first

    @property
    def first_position(self) -> int:
        return self.item.first_position + self.first

    def first_block(self, block_size: int, window: int | None) -> int:
        """Index of the first block that any row of the tile attends to."""
        return 0 if window is None else max(0, self.first_position - window + 1) // block_size

    def num_blocks(self, block_size: int, window: int | None) -> int:
        """Number of blocks from `first_block` to the block of the last position."""
        last = (self.first_position + self.num_rows - 1) // block_size
        return last + 1 - self.first_block(block_size, window)


def _groups(tiles: Sequence[_Tile], num_pairs: Sequence[int], max_pairs: int) -> list[list[_Tile]]:
    """Group consecutive tiles within the pair limit of one call."""
    groups: list[list[_Tile]] = []
    total = max_pairs
    for tile, pairs in zip(tiles, num_pairs, strict=True):
        if total + pairs > max_pairs:
            groups.append([])
            total = 0
        groups[-1].append(tile)
        total += pairs
    return groups
