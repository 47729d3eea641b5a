"""The rows of a step in tiles: one attention call each, for sequences with equal row counts and similar block counts.

    items      A: 3 tokens     B: 1   C: 1   D: 1        blocks to read: A 2, B 7, C 8, D 1
    tiles      [A]  3 rows     [B, C] 1 row of each      [D]

A call gathers the blocks of its sequences, with each block table padded with the null block to the longest; sequences
are grouped only if padding at most doubles the gathered blocks. For a layer with a window only the blocks in the window
are gathered. CALL_TOKENS and CALL_SCORES limit a call.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from quire.backends.host.batch import Batch
from quire.core.step import WorkItem

CALL_TOKENS = 1 << 15
"""Maximum tokens whose keys and values one call gathers, unless a single sequence has more."""
CALL_SCORES = 1 << 24
"""Maximum pairs of a row and a token in one call: the attention scores per head, if attention stores them."""


@dataclass(frozen=True, slots=True)
class Tile:
    """Equally many rows of some sequences, and the blocks that they attend to."""

    rows: mx.array
    """[sequence x row]: indices of the rows in the batch."""
    tables: mx.array
    """[sequence, block]: padded block tables."""
    mask: mx.array
    """[sequence, 1, row, token]: whether the row sees the token."""


@dataclass(frozen=True, slots=True)
class Tiles:
    """All rows of a step, divided into tiles."""

    tiles: tuple[Tile, ...]
    order: mx.array
    """[row of the batch]: its index among the rows of all tiles."""


@dataclass(frozen=True, slots=True)
class _Piece:
    """Consecutive rows of one item."""

    first_row: int
    first_position: int
    num_rows: int
    blocks: tuple[int, ...]
    """The blocks that the rows attend to; the first token of the first block has position `first_token`."""
    first_token: int


def make_tiles(batch: Batch, block_size: int, window: int | None) -> Tiles:
    """Return the tiles for layers with this window (None: no window)."""
    pieces = [
        piece
        for first_row, item in zip(batch.first_rows, batch.items, strict=True)
        for piece in _pieces(item, first_row, block_size, window)
    ]
    tiles, order = [], np.zeros(len(batch.tokens), np.int32)
    num_done = 0
    for group in _groups(pieces, block_size):
        rows = np.concatenate([np.arange(piece.first_row, piece.first_row + piece.num_rows) for piece in group])
        order[rows] = np.arange(num_done, num_done + len(rows))
        num_done += len(rows)
        tiles.append(_tile(group, rows, block_size, window))
    return Tiles(tuple(tiles), mx.array(order))


def _pieces(item: WorkItem, first_row: int, block_size: int, window: int | None) -> Iterator[_Piece]:
    """Divide an item's rows so that no call is too large."""
    end = item.first_position + len(item.token_ids)
    max_rows = max(1, CALL_SCORES // (-(-end // block_size) * block_size))
    for first in range(item.first_position, end, max_rows):
        last = min(first + max_rows, end)
        first_block = 0 if window is None else max(0, first - window + 1) // block_size
        blocks = item.block_ids[first_block : -(-last // block_size)]
        yield _Piece(first_row + first - item.first_position, first, last - first, blocks, first_block * block_size)


def _groups(pieces: Sequence[_Piece], block_size: int) -> Iterator[list[_Piece]]:
    """Group pieces with equal row counts and similar block counts, up to the limits of a call."""
    pieces_by_size: dict[tuple[int, int], list[_Piece]] = {}
    for piece in pieces:
        pieces_by_size.setdefault((piece.num_rows, (len(piece.blocks) - 1).bit_length()), []).append(piece)
    for (num_rows, _), group in pieces_by_size.items():
        tokens = max(len(piece.blocks) for piece in group) * block_size
        group_size = max(1, min(CALL_TOKENS // tokens, CALL_SCORES // (tokens * num_rows)))
        for first in range(0, len(group), group_size):
            yield group[first : first + group_size]


def _tile(group: Sequence[_Piece], rows: NDArray[np.int64], block_size: int, window: int | None) -> Tile:
    num_blocks = max(len(piece.blocks) for piece in group)
    tables = np.zeros((len(group), num_blocks), np.int32)
    for index, piece in enumerate(group):
        tables[index, : len(piece.blocks)] = piece.blocks
    firsts = np.array([[piece.first_position, piece.first_token] for piece in group])
    # [sequence, row, 1] and [sequence, 1, token]
    positions = (firsts[:, :1] + np.arange(group[0].num_rows))[:, :, None]
    tokens = (firsts[:, 1:] + np.arange(num_blocks * block_size))[:, None]
    is_seen = tokens <= positions
    if window is not None:
        is_seen &= tokens > positions - window
    return Tile(mx.array(rows.astype(np.int32)), mx.array(tables), mx.array(is_seen[:, None]))
