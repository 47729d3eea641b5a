"""How full blocks get names, are found by them, and lose them: keeps pool, tree and listeners in step.

Called by `KVMemory` alone. The tree has names and no references, the pool references and no names; the order in which
both are updated is kept here.
"""

from array import array
from collections.abc import Iterator, Sequence

from quire.core.events import BlockStored
from quire.core.memory.block_pool import BlockPool
from quire.core.memory.block_table import BlockTable
from quire.core.memory.kv_publisher import KVPublisher
from quire.core.memory.memory_view import MemoryCounters
from quire.core.memory.prefix_tree import PrefixTree
from quire.core.memory.state_slots import StateSlots


class BlockNames:
    """The names of one memory's blocks."""

    __slots__ = ("_counters", "_named_at_s", "_pool", "_publisher", "_slots", "_tree", "now_s")

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
        self._named_at_s = array("d", bytes(8 * (pool.num_blocks + 1)))

    def found(self, table: BlockTable, tokens: Sequence[int], cap: int) -> list[int]:
        """The named blocks that follow those of the table, up to its block `cap`."""
        self.forget_guesses(table)
        find, digests, tokens_of = self._tree.find, table.digests, table.tokens_of
        first = len(table.blocks)
        parent = table.parent_of(first)
        found: list[int] = []
        for index in range(first, cap):
            self.extend_digests(table, tokens, index + 1)
            block = find(digests[index], tokens_of(index), parent)
            if block is None:
                break
            found.append(block)
            parent = block
        return found

    def extend_digests(self, table: BlockTable, tokens: Sequence[int], num_blocks: int) -> None:
        """Let the table's digest chain reach over its first `num_blocks` full blocks."""
        table.extend_digests(tokens, num_blocks, self._tree.digest_of(table.root), self._tree.hasher.child)

    def forget_guesses(self, table: BlockTable) -> None:
        """Names beyond what is computed were made from tokens that may have changed since: make them anew."""
        num_full = table.num_computed // table.block_size
        if len(table.digests) > num_full:
            table.cut_digests(num_full)

    def name(self, table: BlockTable, first: int, last: int) -> None:
        """Name the full blocks `first` to `last` of a table whose earlier ones are named."""
        first = self._adopt_named(table, first, last)
        if first == last:
            return
        width = 4 * table.block_size
        blocks, digests = table.blocks[first:last], table.digests[first:last]
        packed = bytes(table.packed_tokens[first * width : last * width])
        num_named = self._tree.name(blocks, digests, packed, table.parent_of(first))
        self._pool.name(blocks[:num_named])
        for block in blocks[:num_named]:
            self._named_at_s[block] = self.now_s
        if num_named < len(blocks):
            self._counters.num_collisions += 1
            table.is_naming = False
        if self._publisher is not None and num_named:
            self._publisher.named(table, first, first + num_named, self._tree.namespace_of(table.root))

    def named_at_s(self, block: int) -> float:
        """When a named block got its name."""
        return self._named_at_s[block]

    def _adopt_named(self, table: BlockTable, index: int, last: int) -> int:
        """Where an equal block is named already, take it and release the own one; returns the first index without.

        Equal tokens after an equal prefix are equal KV, bit for bit: one copy is enough. Below a block that is new
        nothing can have been named before, so the equal ones come first.
        """
        while index < last:
            named = self._tree.find(table.digests[index], table.tokens_of(index), table.parent_of(index))
            if named is None:
                break
            self._pool.retain(named)
            self._pool.release((table.blocks[index],))
            table.blocks[index] = named
            index += 1
        return index

    def forget(self, blocks: Sequence[int], now_s: float) -> None:
        """The tree forgets these cached blocks, which have just been taken: leaves come first."""
        digests = self._tree.forget(blocks, now_s)
        self._pool.unname(blocks)
        if self._slots.num_slots:
            self._slots.forget(blocks)
        self._counters.num_evictions += len(digests)
        if self._publisher is not None:
            self._publisher.removed(blocks, digests)

    def kept(self, table: BlockTable) -> None:
        """The last block of this table carries a state now."""
        if self._publisher is not None:
            self._publisher.kept(table, self._tree.namespace_of(table.root))

    def published_blocks(self) -> Iterator[BlockStored]:
        """What listeners were sent and what was not removed since; nothing without a listener."""
        return iter(()) if self._publisher is None else self._publisher.published_blocks(self._tree)

    def clear(self) -> None:
        """Every block loses its name, and every cached state its block."""
        self._slots.clear()
        self._pool.unname_all()
        self._tree.clear()
        if self._publisher is not None:
            self._publisher.cleared()
