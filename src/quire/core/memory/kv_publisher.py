"""Sends listeners to the KV events the blocks that can be hit, in an order in which parents come first.

A block of a plain model can be hit once it is named. With recurrent layers that takes a state as well: a run of named
blocks is published when a state behind it is kept, and those behind the last state are not published at all. That a
state has left is not published while its blocks are there: a router that relies on them pays for computing them again,
and the answer is right.
"""

from collections.abc import Callable, Iterator, Sequence

from quire.core.digests import Namespace
from quire.core.events import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent
from quire.core.memory.block_table import BlockTable, unpack_tokens
from quire.core.memory.kv_dump import iter_cached_blocks
from quire.core.memory.prefix_tree import PrefixTree


class KVPublisher:
    """Sends a listener what becomes of blocks."""

    __slots__ = ("_block_size", "_emit", "_published")

    def __init__(self, emit: Callable[[KVEvent], None], num_blocks: int, block_size: int, *, has_state: bool) -> None:
        self._emit = emit
        """Called in the middle of operations: it must neither raise nor call back. Appending to a list is right."""
        self._block_size = block_size
        self._published = bytearray(num_blocks + 1) if has_state else None
        """Which blocks were published; None where all that are named are."""

    def named(self, table: BlockTable, first: int, last: int, namespace: Namespace) -> None:
        """The full blocks `first` to `last` of this table have been named."""
        if self._published is None:
            self._emit(self._stored(table, first, last, namespace))

    def kept(self, table: BlockTable, namespace: Namespace) -> None:
        """The last block of this table carries a state: it and all before it can be hit."""
        published, last = self._published or bytearray(), len(table.blocks)
        first = last
        while first and not published[table.blocks[first - 1]]:
            first -= 1
            published[table.blocks[first]] = 1
        if first < last:
            self._emit(self._stored(table, first, last, namespace))

    def removed(self, blocks: Sequence[int], digests: Sequence[bytes]) -> None:
        """These blocks have lost their names, leaves first."""
        published = self._published
        if published is not None:
            digests = [digest for block, digest in zip(blocks, digests, strict=True) if published[block]]
            for block in blocks:
                published[block] = 0
        if digests:
            self._emit(BlockRemoved(tuple(digests)))

    def cleared(self) -> None:
        """No block has a name any more."""
        if self._published is not None:
            self._published = bytearray(len(self._published))
        self._emit(AllBlocksCleared())

    def published_blocks(self, tree: PrefixTree) -> Iterator[BlockStored]:
        """All blocks that were published and not removed, for a listener that connects late."""
        return iter_cached_blocks(tree, self._published)

    def _stored(self, table: BlockTable, first: int, last: int, namespace: Namespace) -> BlockStored:
        packed = table.packed_tokens[first * 4 * self._block_size : last * 4 * self._block_size]
        return BlockStored(
            digests=tuple(table.digests[first:last]),
            parent_digest=table.digests[first - 1] if first else None,
            token_ids=unpack_tokens(bytes(packed)),
            block_size=self._block_size,
            adapter=namespace.adapter,
            cache_group=namespace.cache_group,
        )
