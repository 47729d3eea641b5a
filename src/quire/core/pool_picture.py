"""The pool as a map: a byte for each block, or for each run of blocks of a large pool.

A million blocks are not looked at one by one: whole planes of bytes are translated and joined, as bytes and as large
integers. A piece of `PIECE_BLOCKS` takes about a millisecond, and whoever draws decides how many are drawn at once.

    references, named, pins, blocks of the step ─► one byte a block ─► runs: the worst state, the largest count
"""

from collections.abc import Iterable, Iterator
from sys import byteorder

from quire.core.block_pool import BlockPool
from quire.core.block_table import BlockTable
from quire.core.pins import Pins
from quire.core.snapshots import MAX_CELLS, CellCounts, PoolCells

PIECE_BLOCKS = 65_536
MASK = 7
"""The bits of a cell that are its state."""
FREE, CACHED, USED, SHARED, PINNED, COMPUTING = range(6)
STATES = ("free", "cached", "used", "shared", "pinned", "computing")
MAX_COUNT = 31
_LOW = 0 if byteorder == "little" else 3
_BASE = bytes((min(n, 2) + 1 if n else FREE) | min(n, MAX_COUNT) << 3 for n in range(256))
"""A reference count to its cell: nothing is said of names yet."""
_IS_ZERO = bytes([1, *bytes(255)])
_SEVEN = bytes([0, *[7] * 255])
_ONE_HOT = bytes(1 << (n & 7) if (n & 7) < 6 else 0 for n in range(256))
_WORST = bytes(max(n.bit_length() - 1, 0) for n in range(256))
_COUNT = bytes(n >> 3 for n in range(256))
_SHIFTED = bytes(n << 3 & 255 for n in range(256))
_IS_STATE = [bytes((n & 7) == state for n in range(256)) for state in range(len(STATES))]


class PoolDrawing:
    """One drawing, piece by piece: iterate until it ends, then take it. What it shows is as old as its pieces."""

    def __init__(self, pool: BlockPool, pins: Pins, tables: Iterable[BlockTable], block_size: int) -> None:
        self._pool = pool
        self._pins = pins
        self._block_size = block_size
        self._cells = bytearray()
        self.blocks_per_cell = 1
        while -(-pool.num_blocks // self.blocks_per_cell) > MAX_CELLS:
            self.blocks_per_cell *= 2
        self._written = written_blocks(tables)
        self._counts = [0] * len(STATES)

    def pieces(self) -> Iterator[None]:
        """Draws one piece after the other."""
        for first in range(1, self._pool.num_blocks + 1, PIECE_BLOCKS):
            end = min(first + PIECE_BLOCKS, self._pool.num_blocks + 1)
            cells = block_cells(self._pool, self._pins, self._written, first, end)
            self._count(cells)
            self._cells += cells if self.blocks_per_cell == 1 else folded(cells, self.blocks_per_cell)
            yield

    def drawn(self) -> PoolCells:
        """All of it."""
        counts = CellCounts(*self._counts)
        return PoolCells(self._pool.num_blocks, self._block_size, self.blocks_per_cell, bytes(self._cells), counts)

    def _count(self, cells: bytes) -> None:
        found = [int.from_bytes(cells.translate(table), "little").bit_count() for table in _IS_STATE[1:]]
        for state, count in enumerate((len(cells) - sum(found), *found)):
            self._counts[state] += count


def written_blocks(tables: Iterable[BlockTable]) -> list[int]:
    """The blocks that the step in flight writes into."""
    written: list[int] = []
    for table in tables:
        if table.is_in_flight:
            first = table.num_computed // table.block_size
            written += table.blocks[first : -(-table.num_reserved // table.block_size)]
    return written


def block_cells(pool: BlockPool, pins: Pins, written: Iterable[int], first: int, end: int) -> bytes:
    """The cells of the blocks from `first` to before `end`, one each."""
    counts = _capped(pool.ref_count[first:end].tobytes())
    zero = int.from_bytes(counts.translate(_IS_ZERO), "little")
    cached = zero & int.from_bytes(pool.named[first:end], "little")
    cells = int.from_bytes(counts.translate(_BASE), "little") | cached
    if pins.num_pinned_blocks:
        held = int.from_bytes(_capped(pins.pin_count[first:end].tobytes()).translate(_SEVEN), "little")
        fours = int.from_bytes(b"\x04" * (end - first), "little")
        cells = cells & ~held | held & fours
    drawn = bytearray(cells.to_bytes(end - first, "little"))
    for block in written:
        if first <= block < end:
            drawn[block - first] = drawn[block - first] & ~7 | COMPUTING
    return bytes(drawn)


def _capped(raw: bytes) -> bytes:
    """The low byte of each count; those that need more are 255."""
    low, num = raw[_LOW::4], len(raw) // 4
    higher = [raw[plane::4] for plane in range(4) if plane != _LOW]
    if all(plane == bytes(num) for plane in higher):
        return low
    capped = bytearray(low)
    for plane in higher:
        for at, byte in enumerate(plane):
            if byte:
                capped[at] = 255
    return bytes(capped)


def folded(cells: bytes, run: int) -> bytes:
    """One cell for each run of so many, a power of two: the worst state, and the largest count."""
    cells += bytes(-len(cells) % run)
    states = int.from_bytes(cells.translate(_ONE_HOT), "little")
    counts = cells.translate(_COUNT)
    reach = 1
    while reach < run:
        states |= states >> 8 * reach
        counts = _larger(counts[0::2], counts[1::2])
        reach *= 2
    worst = states.to_bytes(len(cells), "little")[::run].translate(_WORST)
    joined = int.from_bytes(worst, "little") | int.from_bytes(counts.translate(_SHIFTED), "little")
    return joined.to_bytes(len(worst), "little")


def _larger(left: bytes, right: bytes) -> bytes:
    """Of each pair of bytes below 128 the larger one: all at once, as two large numbers."""
    num = len(left)
    a, b = int.from_bytes(left, "little"), int.from_bytes(right, "little")
    tops = int.from_bytes(b"\x80" * num, "little")
    is_left = ((a | tops) - b) & tops  # no byte borrows from the next: each is at least 128 before
    mask = is_left | (is_left - (is_left >> 7))
    return (b ^ ((a ^ b) & mask)).to_bytes(num, "little")
