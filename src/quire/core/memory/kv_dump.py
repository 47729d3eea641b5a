"""What a router that connects late has to be sent: every block that can be hit, parents before their children.

All arrays of the tree are copied at once, which takes milliseconds; they are walked later, a little at a time, while
names come and go. So what is sent is the truth of one moment, and no step waits for all of it.
"""

from collections.abc import Iterator, Sequence

from quire.core.digests import DIGEST_BYTES, Namespace
from quire.core.events import BlockStored
from quire.core.memory.block_table import unpack_tokens
from quire.core.memory.prefix_tree import PrefixTree

MAX_RUN_BLOCKS = 64
"""In one event."""


def iter_cached_blocks(tree: PrefixTree, published: bytearray | None) -> Iterator[BlockStored]:
    """The blocks of this tree as they are now, of these only those marked as published, if any are marked."""
    records, first_child, older, roots = tree.copied()
    marked = None if published is None else bytes(published)
    return _Walk(records, first_child, older, tree.block_size, marked).all_of(roots)


class _Walk:
    """Depth first, by runs: a run ends where its last block has no child or several."""

    def __init__(
        self, records: bytes, first_child: Sequence[int], older: Sequence[int], block_size: int, published: bytes | None
    ) -> None:
        self.records = records
        self.first_children = first_child
        self._older = older
        self._block_size = block_size
        self._published = published

    def all_of(self, roots: Sequence[tuple[Namespace, int]]) -> Iterator[BlockStored]:
        for namespace, first in roots:
            open_ends: list[tuple[int, bytes | None]] = [(first, None)] if first else []
            while open_ends:
                block, parent = open_ends.pop()
                if self._older[block]:
                    open_ends.append((self._older[block], parent))
                run = self._run_from(block)
                if not run:
                    continue
                stored = self._stored(run, parent, namespace)
                yield stored
                if child := self.first_children[run[-1]]:
                    open_ends.append((child, stored.digests[-1]))

    def _run_from(self, block: int) -> list[int]:
        run: list[int] = []
        while self._published is None or self._published[block]:
            run.append(block)
            child = self.first_children[block]
            if not child or self._older[child] or len(run) == MAX_RUN_BLOCKS:
                break
            block = child
        return run

    def _stored(self, run: list[int], parent: bytes | None, namespace: Namespace) -> BlockStored:
        width = DIGEST_BYTES + 4 * self._block_size
        found = [self.records[block * width : (block + 1) * width] for block in run]
        return BlockStored(
            digests=tuple(record[:DIGEST_BYTES] for record in found),
            parent_digest=parent,
            token_ids=unpack_tokens(b"".join(record[DIGEST_BYTES:] for record in found)),
            block_size=self._block_size,
            adapter=namespace.adapter,
            cache_group=namespace.cache_group,
        )
