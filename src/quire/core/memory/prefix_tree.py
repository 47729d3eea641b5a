"""The prefix tree of cached blocks. A node of the tree *is* a physical block; there is no separate cache.

A lookup by digest returns a candidate. It is a hit only if its stored tokens and parent are equal too, so a digest
collision never returns wrong KV. The parent of a first block is the root of its namespace; roots are looked up by the
whole namespace. A parent is an integer: a block id (positive), `~slot` of a root (negative), or 0 for unnamed blocks.

Siblings are linked newest first, so that the reason for a miss is found by comparing only a few of them.
"""

from array import array
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from quire.core.digests import DIGEST_BYTES, BlockHasher, Namespace
from quire.core.divergence import Divergence, MissReason
from quire.core.memory.block_table import max_hit_blocks, pack_tokens, unpack_tokens
from quire.core.memory.state_slots import StateSlots
from quire.errors import InvariantError

BLOCKS_PER_SHARD = 1024  # of the digest -> block dictionaries
SHARDS_SWEPT_AT_ONCE = 4
SIBLINGS_COMPARED = 16  # at most, to find the reason for a miss
NAMESPACES_COMPARED = 16  # likewise


def num_shared_tokens(packed: bytes, other: bytes) -> int:
    """Return the number of equal leading tokens of two packed token lists."""
    count = 0
    for start in range(0, min(len(packed), len(other)), 4):
        if packed[start : start + 4] != other[start : start + 4]:
            break
        count += 1
    return count


class EvictionLog:
    """Remembers at least the last `size` evicted digests, and at most twice as many.

    Digests are in two generations of `size` entries, so that an old generation is dropped at once.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._young: dict[bytes, float] = {}
        self._old: dict[bytes, float] = {}

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def record(self, digests: Sequence[bytes], now_s: float) -> None:
        """Record the digests of blocks that have just been evicted."""
        for digest in digests:
            if len(self._young) >= self._size:
                self._old, self._young = self._young, {}
            self._young[digest] = now_s

    def evicted_at_s(self, digest: bytes) -> float | None:
        """Return the time at which this digest was last evicted; None if that is not remembered."""
        time_s = self._young.get(digest)
        return self._old.get(digest) if time_s is None else time_s

    def clear(self) -> None:
        """Forget all digests."""
        self._young, self._old = {}, {}


@dataclass(eq=False, slots=True)
class Root:
    """The root of one namespace. It exists while a table of the namespace is open or the root has a child."""

    namespace: Namespace
    digest: bytes
    first_child: int = 0
    num_tables: int = 0


class PrefixTree:
    """Maps digest -> block (dictionaries) and block -> digest, tokens, parent, siblings, children (flat arrays)."""

    def __init__(self, num_blocks: int, block_size: int, hasher: BlockHasher, num_evictions_remembered: int) -> None:
        self.hasher = hasher
        self.block_size = block_size
        self.evictions = EvictionLog(num_evictions_remembered)
        self._num_blocks = num_blocks
        self._width = 4 * block_size
        self._record_width = DIGEST_BYTES + self._width
        num_shards = 1
        while num_shards * BLOCKS_PER_SHARD < num_blocks:
            num_shards *= 2
        self._shard_mask = num_shards - 1
        self.root_nodes: list[Root | None] = []
        self._slot_of: dict[Namespace, int] = {}
        self.slots_of_group: dict[str, dict[int, Namespace]] = {}
        self._free_slots: list[int] = []
        rows = num_blocks + 1
        self.records = bytearray(self._record_width * rows)
        """Digest and packed tokens of each named block; stale data for other blocks."""
        self._newer = array("i", bytes(4 * rows))
        self._older = array("i", bytes(4 * rows))
        self.discarded: list[dict[bytes, int]] = []
        self._forget_all()

    def _forget_all(self) -> None:
        rows = self._num_blocks + 1
        # One dictionary of a million digests would delay a step by tens of milliseconds whenever it is resized. Small
        # ones are resized one at a time. The garbage collector does not track dicts with bytes keys and int values.
        self.shards: list[dict[bytes, int]] = [{} for _ in range(self._shard_mask + 1)]
        self.parents = array("i", bytes(4 * rows))
        self.first_children = array("i", bytes(4 * rows))

    def sweep(self) -> None:
        """Free a few of the dictionaries that `clear` discarded; freeing all of them at once would delay a step."""
        del self.discarded[-SHARDS_SWEPT_AT_ONCE:]

    # -- roots ---------------------------------------------------------------------------------------------------------

    def open_root(self, namespace: Namespace) -> int:
        """Return the root of this namespace, the parent of its first blocks, for a new table that uses it."""
        slot = self._slot_of.get(namespace)
        if slot is None:
            if namespace.block_size != self.block_size:
                raise InvariantError(
                    f"expected a namespace with blocks of {self.block_size} tokens, got {namespace.block_size}"
                )
            root = Root(namespace, self.hasher.root(namespace))
            slot = self._free_slots.pop() if self._free_slots else len(self.root_nodes)
            self.root_nodes[slot : slot + 1] = [root]
            self._slot_of[namespace] = slot
            self.slots_of_group.setdefault(namespace.cache_group, {})[slot] = namespace
        self._root(~slot).num_tables += 1
        return ~slot

    def close_root(self, root: int) -> None:
        """Record that a table of this root was closed; drop the root if it has no other table and no block."""
        self._root(root).num_tables -= 1
        self._drop_root_if_unused(root)

    def share_root(self, root: int) -> None:
        """Record that a table was forked: one more table uses this root."""
        self._root(root).num_tables += 1

    def namespace_of(self, root: int) -> Namespace:
        """Return the namespace of this root."""
        return self._root(root).namespace

    def _root(self, root: int) -> Root:
        record = self.root_nodes[~root]
        if record is None:
            raise InvariantError(f"expected an open root, got root {root}", code="root_is_closed")
        return record

    def _drop_root_if_unused(self, root: int) -> None:
        record = self._root(root)
        if record.num_tables == 0 and record.first_child == 0:
            group = self.slots_of_group[record.namespace.cache_group]
            del self._slot_of[record.namespace], group[~root]
            if not group:
                del self.slots_of_group[record.namespace.cache_group]
            self.root_nodes[~root] = None
            self._free_slots.append(~root)

    # -- names ---------------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return sum(map(len, self.shards))

    def digest_of(self, node: int) -> bytes:
        """Return the digest of a named block or of a root."""
        if node < 0:
            return self._root(node).digest
        start = node * self._record_width
        return bytes(self.records[start : start + DIGEST_BYTES])

    def tokens_of(self, block: int) -> bytes:
        """Return the packed tokens of a named block."""
        end = (block + 1) * self._record_width
        return bytes(self.records[end - self._width : end])

    def parent_of(self, block: int) -> int:
        """Return the parent of a block: a block (positive), a root (negative), or 0 if the block is not named."""
        return self.parents[block]

    def named(self, digest: bytes) -> int | None:
        """Return the block with this digest, or None. It is only a candidate for a hit: see `is_same`."""
        return self.shards[(digest[0] << 8 | digest[1]) & self._shard_mask].get(digest)

    def is_same(self, block: int, packed_tokens: bytes, parent: int) -> bool:
        """Return whether the block has these tokens and this parent. A digest alone is never trusted."""
        end = (block + 1) * self._record_width
        return self.parents[block] == parent and self.records[end - self._width : end] == packed_tokens

    def find(self, digest: bytes, packed_tokens: bytes, parent: int) -> int | None:
        """Return the cached block with these tokens and this parent, or None."""
        block = self.named(digest)
        return block if block is not None and self.is_same(block, packed_tokens, parent) else None

    def name(self, blocks: Sequence[int], digests: Sequence[bytes], packed_tokens: bytes, parent: int) -> int:
        """Name consecutive computed blocks: each becomes the child of the one before, the first a child of `parent`.

        Stops at a digest that another block already has. Returns the number of blocks that were named.
        """
        if not parent or (parent > 0 and not self.parents[parent]):
            message = f"name: expected the parent {parent} of block {blocks[0]} to be a root or a named block"
            raise InvariantError(message, code="parent_not_named")
        shards, mask, records, parents = self.shards, self._shard_mask, self.records, self.parents
        newer, older, first_child = self._newer, self._older, self.first_children
        record_width, width = self._record_width, self._width
        offset = 0
        for index, (block, digest) in enumerate(zip(blocks, digests, strict=True)):
            shard = shards[(digest[0] << 8 | digest[1]) & mask]
            if digest in shard:
                return index
            if parents[block]:
                raise InvariantError(f"name: expected an unnamed block, got block {block}", code="block_named_already")
            shard[digest] = block
            start = block * record_width
            records[start : start + record_width] = digest + packed_tokens[offset : offset + width]
            offset += width
            parents[block] = parent
            newer[block] = 0
            if index:
                # The parent has just been named, so it has no other children.
                older[block] = 0
                first_child[parent] = block
            else:
                sibling = older[block] = self._first_child_of(parent)
                if sibling:
                    newer[sibling] = block
                self._set_first_child(parent, block)
            parent = block
        return len(blocks)

    def forget(self, blocks: Sequence[int], now_s: float) -> list[bytes]:
        """Remove these blocks, children before parents. Return their digests, which are remembered as evicted."""
        shards, mask, records, parents = self.shards, self._shard_mask, self.records, self.parents
        first_child, newer, older = self.first_children, self._newer, self._older
        record_width = self._record_width
        digests = []
        for block in blocks:
            parent = parents[block]
            if first_child[block] or not parent:
                raise InvariantError(f"forget: expected block {block} to be a named leaf", code="block_not_leaf")
            start = block * record_width
            digest = bytes(records[start : start + DIGEST_BYTES])
            del shards[(digest[0] << 8 | digest[1]) & mask][digest]
            digests.append(digest)
            parents[block] = 0
            newer_sibling, older_sibling = newer[block], older[block]
            if older_sibling:
                newer[older_sibling] = newer_sibling
            if newer_sibling:
                older[newer_sibling] = older_sibling
            elif parent > 0:
                first_child[parent] = older_sibling
            else:
                self._set_first_child(parent, older_sibling)
                if not older_sibling:
                    self._drop_root_if_unused(parent)
        self.evictions.record(digests, now_s)
        return digests

    def clear(self) -> None:
        """Remove all blocks, without remembering them as evicted. Roots with open tables stay."""
        self.discarded += filter(None, self.shards)
        self._forget_all()
        self.evictions.clear()
        for slot, root in enumerate(self.root_nodes):
            if root is not None:
                root.first_child = 0
                self._drop_root_if_unused(~slot)

    def children(self, node: int) -> Iterator[int]:
        """Yield the children of a block or a root, newest first."""
        child = self._first_child_of(node)
        while child:
            yield child
            child = self._older[child]

    def roots(self) -> Iterator[int]:
        """Return all roots, for checks. A namespace without open tables has a root only while its blocks are cached."""
        return iter([~slot for slot in self._slot_of.values()])

    def copy(self, *, bare: bool = False) -> tuple[bytes, Sequence[int], Sequence[int], list[tuple[Namespace, int]]]:
        """Copy the tree's arrays: records (empty if `bare`), first child, older sibling and roots."""
        roots = [(root.namespace, root.first_child) for root in self.root_nodes if root is not None]
        return b"" if bare else bytes(self.records), self.first_children[:], self._older[:], roots

    def num_tables(self, root: int) -> int:
        """Return the number of open tables that use this root."""
        return self._root(root).num_tables

    def _first_child_of(self, node: int) -> int:
        return self.first_children[node] if node > 0 else self._root(node).first_child

    def _set_first_child(self, node: int, child: int) -> None:
        if node > 0:
            self.first_children[node] = child
        else:
            self._root(node).first_child = child

    # -- reasons for misses --------------------------------------------------------------------------------------------

    def divergence(
        self,
        namespace: Namespace,
        tokens: Sequence[int],
        in_flight: Container[bytes],
        now_s: float,
        slots: StateSlots | None = None,
        digests: Sequence[bytes] = (),
    ) -> Divergence:
        """Return how many of these tokens are cached, and the first applicable `MissReason` of the next block.

        `slots` is passed for models with recurrent layers, where a hit ends at the deepest block with a cached state.
        `digests` are digests of the first blocks that were computed before; computing them is most of the work.
        """
        packed = pack_tokens(tokens)
        max_blocks = max_hit_blocks(len(tokens), self.block_size)
        slot = self._slot_of.get(namespace)
        node = None if slot is None else ~slot
        digest = self.hasher.root(namespace)
        num_hits = num_usable = 0
        next_tokens = first_unusable = b""
        while num_hits < max_blocks:
            next_tokens = packed[num_hits * self._width : (num_hits + 1) * self._width]
            digest = digests[num_hits] if num_hits < len(digests) else self.hasher.child(digest, next_tokens)
            block = None if node is None else self.find(digest, next_tokens, node)
            if block is None:
                break
            node, num_hits = block, num_hits + 1
            if slots is None or slots.slot_of(block) is not None:
                num_usable, first_unusable = num_hits, b""
            else:
                first_unusable = first_unusable or digest
        if first_unusable:
            reason = MissReason.COMPUTING if first_unusable in in_flight else MissReason.STATE_MISSING
            return Divergence(num_usable * self.block_size, reason)
        num_cached = num_hits * self.block_size
        if num_hits >= max_blocks:
            return Divergence(num_cached, MissReason.TOO_SHORT)
        if digest in in_flight:
            return Divergence(num_cached, MissReason.COMPUTING)
        evicted_at_s = self.evictions.evicted_at_s(digest)
        if evicted_at_s is not None:
            return Divergence(num_cached, MissReason.EVICTED, evicted_s_ago=max(0.0, now_s - evicted_at_s))
        return self._divergence_of_new(namespace, next_tokens, node, num_cached)

    def _divergence_of_new(
        self, namespace: Namespace, next_tokens: bytes, node: int | None, num_cached: int
    ) -> Divergence:
        """Return the reason for the miss of a block that is not remembered as cached, evicted or in flight."""
        sibling = b"" if node is None else self._closest_sibling(node, next_tokens)
        if shared := num_shared_tokens(sibling, next_tokens):
            return Divergence(num_cached, MissReason.DIVERGED, num_cached + shared, unpack_tokens(sibling))
        other = None if num_cached else self._same_tokens_elsewhere(namespace, next_tokens)
        if other is not None:
            return Divergence(num_cached, MissReason.OTHER_NAMESPACE, other_namespace=other)
        return Divergence(num_cached, MissReason.FIRST_SEEN)

    def _closest_sibling(self, node: int, packed_tokens: bytes) -> bytes:
        """Return the tokens of that child of `node` (among the newest) that has most leading tokens in common."""
        newest = (self.tokens_of(child) for child in islice(self.children(node), SIBLINGS_COMPARED))
        return max(newest, key=lambda tokens: num_shared_tokens(tokens, packed_tokens), default=b"")

    def _same_tokens_elsewhere(self, namespace: Namespace, packed_tokens: bytes) -> Namespace | None:
        """Return a namespace of the same cache group (another model, adapter or format) that has this first block."""
        group = self.slots_of_group.get(namespace.cache_group, {})
        for slot, candidate in islice(reversed(group.items()), NAMESPACES_COMPARED):
            root = ~slot
            digest = self.hasher.child(self._root(root).digest, packed_tokens)
            if self.find(digest, packed_tokens, root) is not None:
                return candidate
        return None
