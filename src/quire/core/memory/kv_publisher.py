"""Publishes KV events: which blocks can be hit, parents before children.

Without recurrent layers, a block can be hit as soon as it is named (in the prefix tree). With recurrent layers, a hit
also needs a cached state: consecutive named blocks are published when the state after them is cached, and blocks after
the last state are not published. The eviction of a state alone is not published: a router may then count on blocks
that must be computed again, which costs time but changes no result.

A router that connects late needs all blocks that can be hit, parents before children. The arrays of the tree are copied
at once, which takes milliseconds, and the copy is walked later in small pieces while the tree changes. So the router
receives a consistent snapshot, and no step waits for the whole walk.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from quire.core.digests import DIGEST_BYTES, Namespace
from quire.core.events import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent
from quire.core.memory.block_table import BlockTable, unpack_tokens
from quire.core.memory.prefix_tree import PrefixTree

MAX_RUN_BLOCKS = 64
"""Maximum number of blocks per event for a router that connected late."""


class KVPublisher:
    """Emits KV events as blocks become available for hits and are removed."""

    def __init__(self, emit: Callable[[KVEvent], None], num_blocks: int, block_size: int, *, has_state: bool) -> None:
        self._emit = emit
        """Called in the middle of memory operations, so it must neither raise nor use the memory."""
        self._block_size = block_size
        self._published = bytearray(num_blocks + 1) if has_state else None
        """Block -> 1 if it was published; None if all named blocks are published (no recurrent layers)."""

    def publish_named(self, table: BlockTable, first: int, end: int, namespace: Namespace) -> None:
        """Publish the newly named blocks [first, end) of this table, unless hits also need a state."""
        if self._published is None:
            self._emit(self._stored(table, first, end, namespace))

    def publish_state(self, table: BlockTable, namespace: Namespace) -> None:
        """Publish the table's unpublished blocks, because its last block now has a cached state."""
        published, end = self._published or bytearray(), len(table.blocks)
        first = end
        while first and not published[table.blocks[first - 1]]:
            first -= 1
            published[table.blocks[first]] = 1
        if first < end:
            self._emit(self._stored(table, first, end, namespace))

    def publish_removed(self, blocks: Sequence[int], digests: Sequence[bytes]) -> None:
        """Publish the removal of these blocks; children precede parents."""
        published = self._published
        if published is not None:
            digests = [digest for block, digest in zip(blocks, digests, strict=True) if published[block]]
            for block in blocks:
                published[block] = 0
        if digests:
            self._emit(BlockRemoved(tuple(digests)))

    def publish_cleared(self) -> None:
        """Publish that all blocks were removed."""
        if self._published is not None:
            self._published = bytearray(len(self._published))
        self._emit(AllBlocksCleared())

    def published_blocks(self, tree: PrefixTree) -> Iterator[BlockStored]:
        """Iterate over all published blocks that were not removed since, for a router that connects late."""
        records, first_children, older, roots = tree.copy()
        published = None if self._published is None else bytes(self._published)
        return _Walk(records, first_children, older, self._block_size, published).events(roots)

    def _stored(self, table: BlockTable, first: int, end: int, namespace: Namespace) -> BlockStored:
        packed = bytes(table.packed_tokens[first * 4 * self._block_size : end * 4 * self._block_size])
        parent = table.digests[first - 1] if first else None
        return _run_stored(table.digests[first:end], parent, packed, self._block_size, namespace)


def _run_stored(
    digests: Sequence[bytes], parent: bytes | None, packed: bytes, block_size: int, namespace: Namespace
) -> BlockStored:
    tokens = unpack_tokens(packed)
    return BlockStored(tuple(digests), parent, tokens, block_size, namespace.adapter, namespace.cache_group)


@dataclass(frozen=True)
class _Walk:
    """A depth-first walk over a copy of the tree, in runs of blocks without a fork, of limited length."""

    records: bytes
    first_children: Sequence[int]
    older: Sequence[int]
    block_size: int
    published: bytes | None
    """Block -> 1 if it was published; None: all blocks were."""

    def events(self, roots: Sequence[tuple[Namespace, int]]) -> Iterator[BlockStored]:
        for namespace, first_child in roots:
            to_visit: list[tuple[int, bytes | None]] = [(first_child, None)] if first_child else []
            while to_visit:
                block, parent = to_visit.pop()
                if self.older[block]:
                    to_visit.append((self.older[block], parent))
                run = self._run_from(block)
                if not run:
                    continue
                stored = self._stored(run, parent, namespace)
                yield stored
                if child := self.first_children[run[-1]]:
                    to_visit.append((child, stored.digests[-1]))

    def _run_from(self, block: int) -> list[int]:
        run: list[int] = []
        while self.published is None or self.published[block]:
            run.append(block)
            child = self.first_children[block]
            if not child or self.older[child] or len(run) == MAX_RUN_BLOCKS:
                break
            block = child
        return run

    def _stored(self, run: list[int], parent: bytes | None, namespace: Namespace) -> BlockStored:
        width = DIGEST_BYTES + 4 * self.block_size
        rows = [self.records[block * width : (block + 1) * width] for block in run]
        digests, packed = [row[:DIGEST_BYTES] for row in rows], b"".join(row[DIGEST_BYTES:] for row in rows)
        return _run_stored(digests, parent, packed, self.block_size, namespace)
