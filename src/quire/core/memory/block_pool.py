"""The block pool: reference counts, and the free queue in eviction order. It has no access to tokens or prefix tree.

A block is an integer index into a few flat arrays. So even a pool of a million blocks consists of few Python objects:
the garbage collector has little to scan, and the cost of an operation does not depend on the size of the pool.

Each block is in one of three states, given by its reference count and whether it is *named* (in the prefix tree):

    references   named?
        > 0      any      referenced   at least one block table or pin uses the block
          0      yes      cached       free, still in the prefix tree; can be hit or reallocated
          0      no       blank        free, without useful content

Blocks without references are in the free queue: one circular doubly linked list with two sentinels, so that no
operation has a special case at the ends. Blocks are allocated from the left.

    ┌─► [NULL] ⇄ blank ⇄ blank ⇄ [border] ⇄ oldest cached ⇄ … ⇄ newest cached ◄─┐
    └───────────────────────────────────────────────────────────────────────────┘

Blank blocks come first, because reallocating them loses no cached data. Block 0, the null block, is never allocated:
runners use it for padding rows, and the free queue uses it as its first sentinel.
"""

from array import array
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from quire.errors import ConfigError, InvariantError, OutOfBlocksError

NULL_BLOCK = 0


class Allocation(NamedTuple):
    """Newly allocated blocks, each with one reference."""

    blocks: list[int]
    evicted: list[int]
    """Those of `blocks` that were cached. The caller must remove them from the prefix tree in this order."""


class BlockPool:
    """Allocates blocks 1 to `num_blocks`, counts their references and decides which block is evicted next."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ConfigError(f"expected a pool of at least 1 block, got {num_blocks}; raise the memory budget")
        self.num_blocks = num_blocks
        self._border = num_blocks + 1
        self.ref_count = array("i", bytes(4 * (num_blocks + 2)))
        self.named = bytearray(num_blocks + 2)
        self.num_named = 0
        self.num_blank = num_blocks
        self.num_cached = 0
        # NULL ⇄ 1 ⇄ 2 ⇄ … ⇄ border ⇄ NULL
        self.next_free = array("i", range(1, num_blocks + 3))
        self.next_free[self._border] = NULL_BLOCK
        self.prev_free = array("i", range(-1, num_blocks + 1))
        self.prev_free[NULL_BLOCK] = self._border

    @property
    def num_free(self) -> int:
        """Number of blocks that can be allocated: blank and cached blocks."""
        return self.num_blank + self.num_cached

    @property
    def num_referenced(self) -> int:
        """Number of blocks that tables or pins use."""
        return self.num_blocks - self.num_blank - self.num_cached

    def allocate(self, count: int) -> Allocation:
        """Allocate `count` blocks: first blank blocks, then the least recently used cached blocks.

        No other method allocates blocks for tables. `take_cached` evicts from the same end of the queue. Raises
        OutOfBlocksError if fewer than `count` blocks are free."""
        if count > self.num_free:
            raise OutOfBlocksError(count, self.num_free)
        num_blank = min(count, self.num_blank)
        blocks = self._take_after(NULL_BLOCK, num_blank) if num_blank else []
        evicted = self._take_after(self._border, count - num_blank) if count > num_blank else []
        self.num_blank -= num_blank
        self.num_cached -= len(evicted)
        return Allocation(blocks + evicted, evicted)

    def retain(self, block: int) -> None:
        """Add a reference, and remove a cached block from the free queue. Raises InvariantError for a blank block."""
        count = self._count(block)
        if count == 0:
            if not self.named[block]:
                raise InvariantError(f"retain: expected no blank block, got {block}", code="block_is_blank")
            self._unlink(block)
            self.num_cached -= 1
        self.ref_count[block] = count + 1

    def release(self, blocks: Iterable[int]) -> None:
        """Drop one reference of each block, in the given order. Callers pass a table's last block first.

        So children are ahead of their parents in the queue, and the oldest cached block is always a leaf of the tree.
        """
        next_, prev, ref_count, named = self.next_free, self.prev_free, self.ref_count, self.named
        num_blocks = self.num_blocks
        for block in blocks:
            # Checked because a negative index would refer to a block of another table.
            count = ref_count[block] - 1 if 0 < block <= num_blocks else -1
            if count < 0:
                raise InvariantError(f"release: block {block} has no references", code="block_not_held")
            ref_count[block] = count
            if count:
                continue
            if named[block]:
                self.num_cached += 1
                before, after = prev[NULL_BLOCK], NULL_BLOCK
            else:
                self.num_blank += 1
                before, after = NULL_BLOCK, next_[NULL_BLOCK]
            prev[block], next_[block] = before, after
            next_[before] = prev[after] = block

    def name(self, blocks: Sequence[int]) -> None:
        """Mark referenced blocks as named: without references they will be cached, not blank."""
        for block in blocks:
            if self._count(block) == 0 or self.named[block]:
                raise InvariantError(f"name: expected block {block} referenced, unnamed", code="cannot_name_block")
            self.named[block] = 1
        self.num_named += len(blocks)

    def unname(self, blocks: Sequence[int]) -> None:
        """Mark blocks as not named any more, just after `allocate` or `take_cached` has taken them from the queue."""
        for block in blocks:
            if not self.named[block] or self.ref_count[block] == 0:
                raise InvariantError(f"unname: expected block {block} to be named and removed from the queue")
            self.named[block] = 0
        self.num_named -= len(blocks)

    def take_cached(self, count: int) -> list[int]:
        """Take up to `count` least recently used cached blocks and no blank blocks; used to evict on demand."""
        blocks = self._take_after(self._border, min(count, self.num_cached))
        self.num_cached -= len(blocks)
        return blocks

    def unname_all(self) -> None:
        """Turn all cached blocks into blank blocks by moving the border to the end of the queue, in O(1)."""
        self._unlink(self._border)
        last = self.prev_free[NULL_BLOCK]
        self.prev_free[self._border], self.next_free[self._border] = last, NULL_BLOCK
        self.next_free[last] = self.prev_free[NULL_BLOCK] = self._border
        self.num_blank += self.num_cached
        self.num_cached = 0
        self.num_named = 0
        self.named = bytearray(self.num_blocks + 2)

    def free_queue(self) -> Iterable[int]:
        """Yield the free blocks in allocation order. For checks and visualization; O(free)."""
        block = self.next_free[NULL_BLOCK]
        while block != NULL_BLOCK:
            if block != self._border:
                yield block
            block = self.next_free[block]

    def check_links(self) -> None:
        """Check that forward and backward links of the free queue agree; O(free). Raises InvariantError."""
        block = NULL_BLOCK
        for _ in range(self.num_free + 2):
            after = self.next_free[block]
            if self.prev_free[after] != block:
                raise InvariantError(f"free queue: {block} -> {after}, but {after} <- {self.prev_free[after]}")
            block = after
        if block != NULL_BLOCK:
            raise InvariantError(f"free queue: not closed after {self.num_free} blocks", code="free_queue_open")

    def _count(self, block: int) -> int:
        if not 0 < block <= self.num_blocks:
            raise InvariantError(f"expected a block id from 1 to {self.num_blocks}, got {block}")
        return self.ref_count[block]

    def _unlink(self, block: int) -> None:
        before, after = self.prev_free[block], self.next_free[block]
        self.next_free[before] = after
        self.prev_free[after] = before

    def _take_after(self, sentinel: int, count: int) -> list[int]:
        """Unlink the `count` blocks to the right of a sentinel; only the links at both ends change."""
        next_, ref_count = self.next_free, self.ref_count
        blocks: list[int] = []
        block = sentinel
        for _ in range(count):
            block = next_[block]
            if ref_count[block]:
                raise InvariantError(f"free queue: block {block} is queued and has {ref_count[block]} references")
            ref_count[block] = 1
            blocks.append(block)
        after = next_[block]
        next_[sentinel] = after
        self.prev_free[after] = sentinel
        return blocks
