"""Registers full blocks in the prefix tree, looks them up and removes them. A registered block is called *named*.

Only `KVMemory` calls this module. The tree stores digests and the pool stores reference counts; this module updates
pool, tree and KV event publisher together, in the right order.
"""

from array import array
from collections.abc import Sequence

from quire.core.memory.block_pool import BlockPool
from quire.core.memory.block_table import BlockTable
from quire.core.memory.kv_config import MemoryCounters
from quire.core.memory.kv_publisher import KVPublisher
from quire.core.memory.prefix_tree import PrefixTree
from quire.core.memory.state_slots import StateSlots


class BlockNames:
    """Adds the blocks of one memory to its prefix tree, looks them up and removes them."""

    def __init__(
        self,
        pool: BlockPool,
        tree: PrefixTree,
        slots: StateSlots,
        counters: MemoryCounters,
        publisher: KVPublisher | None,
    ) -> None:
        self._pool = pool
        self._tree = tree
        self._slots = slots
        self._counters = counters
        self._publisher = publisher
        self.now_s = 0.0
        self.named_at_s = array("d", bytes(8 * (pool.num_blocks + 1)))
        """Block -> time at which it was named; meaningless for other blocks."""

    def find_cached(self, table: BlockTable, tokens: Sequence[int], max_blocks: int) -> list[int]:
        """Return the cached blocks that continue the table's blocks, up to block index `max_blocks`."""
        self.drop_provisional_digests(table)
        find, digests, tokens_of = self._tree.find, table.digests, table.tokens_of
        first = len(table.blocks)
        parent = table.parent_of(first)
        blocks: list[int] = []
        for index in range(first, max_blocks):
            self.extend_digests(table, tokens, index + 1)
            block = find(digests[index], tokens_of(index), parent)
            if block is None:
                break
            blocks.append(block)
            parent = block
        return blocks

    def extend_digests(self, table: BlockTable, tokens: Sequence[int], num_blocks: int) -> None:
        """Extend the table's digests to its first `num_blocks` full blocks."""
        table.extend_digests(tokens, num_blocks, self._tree.digest_of(table.root), self._tree.hasher.child)

    def drop_provisional_digests(self, table: BlockTable) -> None:
        """Drop the digests of blocks that are not fully computed, because their tokens may have changed since."""
        num_full = table.num_computed // table.block_size
        if len(table.digests) > num_full:
            table.cut_digests(num_full)

    def name(self, table: BlockTable, first: int, end: int) -> int:
        """Name the full blocks [first, end) of a table whose earlier blocks are named. Returns how many were not cached
        before."""
        first = self._adopt_named(table, first, end)
        if first == end:
            return 0
        width = 4 * table.block_size
        blocks, digests = table.blocks[first:end], table.digests[first:end]
        packed = bytes(table.packed_tokens[first * width : end * width])
        num_named = self._tree.name(blocks, digests, packed, table.parent_of(first))
        self._pool.name(blocks[:num_named])
        for block in blocks[:num_named]:
            self.named_at_s[block] = self.now_s
        if num_named < len(blocks):
            self._counters.num_collisions += 1
            table.is_naming = False
        if self._publisher is not None and num_named:
            self._publisher.publish_named(table, first, first + num_named, self._tree.namespace_of(table.root))
        return num_named

    def _adopt_named(self, table: BlockTable, index: int, end: int) -> int:
        """Replace blocks from `index` on by equal blocks that are already named; return the first index without one.

        Equal tokens after an equal prefix have bit-identical KV, so one copy is enough. A block that is not named yet
        cannot have named children, so the blocks with a named equal are the first ones.
        """
        while index < end:
            cached_block = self._tree.find(table.digests[index], table.tokens_of(index), table.parent_of(index))
            if cached_block is None:
                break
            self._pool.retain(cached_block)
            self._pool.release((table.blocks[index],))
            table.blocks[index] = cached_block
            index += 1
        return index

    def forget(self, blocks: Sequence[int], now_s: float) -> None:
        """Remove cached blocks from the tree after the pool has reallocated them; children precede parents."""
        digests = self._tree.forget(blocks, now_s)
        self._pool.unname(blocks)
        if self._slots.num_slots:
            self._slots.forget(blocks)
        self._counters.num_evictions += len(digests)
        if self._publisher is not None:
            self._publisher.publish_removed(blocks, digests)

    def publish_state(self, table: BlockTable) -> None:
        """Publish that the table's last block now has a cached recurrent state."""
        if self._publisher is not None:
            self._publisher.publish_state(table, self._tree.namespace_of(table.root))

    def clear(self) -> None:
        """Remove all blocks from the tree, and all cached recurrent states."""
        self._slots.clear()
        self._pool.unname_all()
        self._tree.clear()
        if self._publisher is not None:
            self._publisher.publish_cleared()
