"""The pool as a map for the dashboard: one byte (*cell*) per block, or per run of adjacent blocks in a large pool.

To be fast for a million blocks, there is no loop over blocks: whole byte arrays are translated, and combined as large
integers. The map is built in pieces of less than a millisecond; the caller decides how many to build at a time.

    references ─┐
    named ──────┼─► one cell per block or run: its highest state and largest reference count
    pins ───────┤
    the step ───┘
"""

from collections.abc import Iterable, Iterator
from sys import byteorder

from quire.core.inspect.snapshots import MAX_CELLS, CellCounts, PoolCells
from quire.core.memory.block_pool import BlockPool
from quire.core.memory.block_table import BlockTable
from quire.core.memory.pins import Pins

PIECE_BLOCKS = 65_536
MASK = 7
"""Mask of the state bits of a cell."""
FREE, CACHED, USED, SHARED, PINNED, COMPUTING = range(6)
STATES = ("free", "cached", "used", "shared", "pinned", "computing")
MAX_COUNT = 31
LEVELS = (1, 2, 3, 4, 8, 16, MAX_COUNT)
"""Reference counts in runs are rounded down to these levels. Each level is one bit, so OR finds the largest."""
_NAMED = 0x80
_LOW_BYTE = 0 if byteorder == "little" else 3
_BIT_OF = bytes(1 << max(bit for bit, level in enumerate(LEVELS) if level <= n) if n else 0 for n in range(256))
_IS_ZERO = bytes([1, *bytes(255)])
_IS_SHARED = bytes([0, 0, *[1] * 254])
_PIN_MASKS = bytes([0, *[MASK] * 255])


def _used_cell(count: int) -> int:
    return (SHARED if count > 1 else USED) | min(count, MAX_COUNT) << 3


_CELL_OF = bytes([FREE, *(_used_cell(n) for n in range(1, 256))])
"""Reference count -> cell, regardless of whether the block is named."""
_CELL_OF_BITS = bytes(
    _used_cell(LEVELS[(n & ~_NAMED).bit_length() - 1]) if n & ~_NAMED else CACHED if n else FREE for n in range(256)
)
"""OR of the level and named bits of a run -> cell. The named bit matters only if no block is referenced."""


class PoolDrawing:
    """Builds one map in pieces: exhaust `pieces()`, then call `result()`. A piece shows the state when it was built."""

    def __init__(self, pool: BlockPool, pins: Pins, tables: Iterable[BlockTable], block_size: int) -> None:
        self._pool = pool
        self._pins = pins
        self._block_size = block_size
        self._cells = bytearray()
        self.blocks_per_cell = 1
        while -(-pool.num_blocks // self.blocks_per_cell) > MAX_CELLS:
            self.blocks_per_cell *= 2
        self._tables = tables
        self._written: list[int] = []
        self._num_shared = 0

    def pieces(self) -> Iterator[None]:
        """Build the map, one piece per iteration."""
        pool = self._pool
        for first in range(1, pool.num_blocks + 1, PIECE_BLOCKS):
            end = min(first + PIECE_BLOCKS, pool.num_blocks + 1)
            counts = low_bytes(pool.ref_count[first:end].tobytes())
            pins = self._pinned_in(first, end)
            is_shared = int.from_bytes(counts.translate(_IS_SHARED), "little") & ~int.from_bytes(pins, "little")
            self._num_shared += is_shared.bit_count()
            if self.blocks_per_cell == 1:
                cells = _cells(counts, pool.named[first:end])
            else:
                cells = _cells_of_runs(counts, pool.named[first:end], self.blocks_per_cell)
                pins = join_runs(pins, self.blocks_per_cell)
            self._cells += _with_pins(cells, pins)
            yield
        self._written = written_blocks(self._tables)
        for block in self._written:
            cell = (block - 1) // self.blocks_per_cell
            self._cells[cell] = self._cells[cell] & ~MASK | COMPUTING

    def result(self) -> PoolCells:
        """Return the map; call this right after the last piece. The block counts are those of now."""
        pool, num_computing = self._pool, len(self._written)
        num_used = pool.num_referenced - self._pins.num_pinned_blocks - num_computing
        num_shared = min(self._num_shared, num_used)  # some blocks may have been released since their piece was built
        counts = CellCounts(
            pool.num_blank,
            pool.num_cached,
            num_used - num_shared,
            num_shared,
            self._pins.num_pinned_blocks,
            num_computing,
        )
        return PoolCells(pool.num_blocks, self._block_size, self.blocks_per_cell, bytes(self._cells), counts)

    def _pinned_in(self, first: int, end: int) -> bytes:
        """Return `MASK` for each pinned block and 0 for the others; empty if no block is pinned."""
        if not self._pins.num_pinned_blocks:
            return b""
        return low_bytes(self._pins.pin_count[first:end].tobytes()).translate(_PIN_MASKS)


def state_of(pool: BlockPool, pins: Pins, tables: Iterable[BlockTable], block: int) -> str:
    """Return the name of one block's state, as in `CellCounts`."""
    if block in written_blocks(tables):
        return STATES[COMPUTING]
    if pins.pin_count[block]:
        return STATES[PINNED]
    count = min(pool.ref_count[block], MAX_COUNT)
    return STATES[_CELL_OF[count] & MASK if count else CACHED if pool.named[block] else FREE]


def written_blocks(tables: Iterable[BlockTable]) -> list[int]:
    """Return the blocks that the step in flight writes into."""
    blocks: list[int] = []
    for table in tables:
        if table.is_in_flight:
            first = table.num_computed // table.block_size
            blocks += table.blocks[first : -(-table.num_reserved // table.block_size)]
    return blocks


def _cells(counts: bytes, named: bytearray) -> bytes:
    """Return one cell per block, without pins."""
    zero = int.from_bytes(counts.translate(_IS_ZERO), "little")
    cached = zero & int.from_bytes(named, "little")
    return (int.from_bytes(counts.translate(_CELL_OF), "little") | cached).to_bytes(len(counts), "little")


def _cells_of_runs(counts: bytes, named: bytearray, run: int) -> bytes:
    """Return one cell per run of `run` blocks (a power of two), without pins."""
    bits = int.from_bytes(counts.translate(_BIT_OF), "little") | int.from_bytes(named, "little") << 7
    return join_runs(bits.to_bytes(len(counts), "little"), run).translate(_CELL_OF_BITS)


def _with_pins(cells: bytes, pins: bytes) -> bytes:
    if not pins:
        return cells
    all_bits = int.from_bytes(pins, "little")
    pinned_bits = all_bits & int.from_bytes(bytes([PINNED]) * len(cells), "little")
    return (int.from_bytes(cells, "little") & ~all_bits | pinned_bits).to_bytes(len(cells), "little")


def join_runs(plane: bytes, run: int) -> bytes:
    """OR the bytes of each run of `run` bytes (a power of two) into one byte."""
    bits, width = int.from_bytes(plane, "little"), 1
    while width < run:
        bits |= bits >> 8 * width
        width *= 2
    return bits.to_bytes(len(plane), "little")[::run]


def low_bytes(raw: bytes) -> bytes:
    """Convert the bytes of native 32-bit integers to one byte each; values above 255 become 255."""
    low, zeros = raw[_LOW_BYTE::4], bytes(len(raw) // 4)
    higher_planes = [raw[byte_plane::4] for byte_plane in range(4) if byte_plane != _LOW_BYTE]
    if all(byte_plane == zeros for byte_plane in higher_planes):
        return low
    capped = bytearray(low)
    for byte_plane in higher_planes:
        for index, byte in enumerate(byte_plane):
            if byte:
                capped[index] = 255
    return bytes(capped)
