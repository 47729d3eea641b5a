"""The tree that the names of blocks form. A node of the tree *is* a physical block; there is no second store.

The digest of a block finds a candidate; the candidate is a hit only if its stored tokens and its parent are equal too,
so even a colliding digest never serves the wrong KV. The parent of a first block is its namespace's root, kept by the
whole namespace. A parent fits in one integer: a block id above zero, `~slot` of a root below zero, or zero: not named.

Siblings are linked newest first: that is what explains a miss without a search.
"""

from array import array
from collections.abc import Container, Iterator, Sequence
from itertools import islice

from quire.core.digests import DIGEST_BYTES, BlockHasher, Namespace
from quire.core.divergence import Divergence, MissReason
from quire.core.memory.block_table import hit_cap, pack_tokens, unpack_tokens
from quire.core.memory.state_slots import StateSlots
from quire.errors import InvariantError

BLOCKS_PER_SHARD = 1024
SHARDS_SWEPT_AT_ONCE = 4
SIBLINGS_COMPARED = 16
NAMESPACES_COMPARED = 16


def num_shared_tokens(packed: bytes, other: bytes) -> int:
    """How many leading tokens two packed runs have in common."""
    shared = 0
    for start in range(0, min(len(packed), len(other)), 4):
        if packed[start : start + 4] != other[start : start + 4]:
            break
        shared += 1
    return shared


class EvictionLog:
    """Remembers at least the last `size` evicted digests, and at most twice as many.

    Two generations instead of a queue: forgetting costs nothing per entry.
    """

    __slots__ = ("_old", "_size", "_young")

    def __init__(self, size: int) -> None:
        self._size = size
        self._young: dict[bytes, float] = {}
        self._old: dict[bytes, float] = {}

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def record(self, digests: Sequence[bytes], now_s: float) -> None:
        """These blocks have just been evicted."""
        for digest in digests:
            if len(self._young) >= self._size:
                self._old, self._young = self._young, {}
            self._young[digest] = now_s

    def evicted_at_s(self, digest: bytes) -> float | None:
        """When it was last evicted, if that is still remembered."""
        at_s = self._young.get(digest)
        return self._old.get(digest) if at_s is None else at_s

    def clear(self) -> None:
        """Remember nothing."""
        self._young, self._old = {}, {}


class Root:
    """The tree's root for one namespace: alive while a table is open in it or a block is named under it."""

    __slots__ = ("digest", "first_child", "namespace", "num_tables")

    def __init__(self, namespace: Namespace, digest: bytes) -> None:
        self.namespace = namespace
        self.digest = digest
        self.first_child = 0
        self.num_tables = 0


class PrefixTree:
    """digest -> block and block -> (digest, tokens, parent, children), in flat arrays."""

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
        """Digest and packed tokens of each named block; of others, whatever was there."""
        self._newer = array("i", bytes(4 * rows))
        self._older = array("i", bytes(4 * rows))
        self.discarded: list[dict[bytes, int]] = []
        self._forget_all()

    def _forget_all(self) -> None:
        rows = self._num_blocks + 1
        # One dictionary of a million names would stop a step for tens of milliseconds whenever it grows. Many small
        # ones grow one at a time; with bytes for keys and integers for values the garbage collector skips them.
        self.shards: list[dict[bytes, int]] = [{} for _ in range(self._shard_mask + 1)]
        self.parents = array("i", bytes(4 * rows))
        self.first_children = array("i", bytes(4 * rows))

    def sweep(self) -> None:
        """Give back a little of what `clear` put aside: freeing a million names at once would stop a step."""
        del self.discarded[-SHARDS_SWEPT_AT_ONCE:]

    # -- roots ---------------------------------------------------------------------------------------------------------

    def open_root(self, namespace: Namespace) -> int:
        """The root of this namespace, as the parent of first blocks, kept alive until `close_root`."""
        slot = self._slot_of.get(namespace)
        if slot is None:
            if namespace.block_size != self.block_size:
                raise InvariantError(
                    f"expected a namespace of {self.block_size}-token blocks, got one of {namespace.block_size}-token "
                    "blocks"
                )
            root = Root(namespace, self.hasher.root(namespace))
            slot = self._free_slots.pop() if self._free_slots else len(self.root_nodes)
            self.root_nodes[slot : slot + 1] = [root]
            self._slot_of[namespace] = slot
            self.slots_of_group.setdefault(namespace.cache_group, {})[slot] = namespace
        self._root(~slot).num_tables += 1
        return ~slot

    def close_root(self, root: int) -> None:
        """One table fewer; a root that is not needed any more is dropped."""
        self._root(root).num_tables -= 1
        self._drop_root_if_unused(root)

    def share_root(self, root: int) -> None:
        """One more table in the same namespace: a fork."""
        self._root(root).num_tables += 1

    def namespace_of(self, root: int) -> Namespace:
        """The namespace whose blocks hang under this root."""
        return self._root(root).namespace

    def _root(self, root: int) -> Root:
        found = self.root_nodes[~root]
        if found is None:
            raise InvariantError(f"root {root} is used after it was closed", code="root_is_closed")
        return found

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
        """The digest of a named block or of a root."""
        if node < 0:
            return self._root(node).digest
        start = node * self._record_width
        return bytes(self.records[start : start + DIGEST_BYTES])

    def tokens_of(self, block: int) -> bytes:
        """The packed tokens of a named block."""
        end = (block + 1) * self._record_width
        return bytes(self.records[end - self._width : end])

    def parent_of(self, block: int) -> int:
        """A block above zero, a root below zero, zero if the block is not named."""
        return self.parents[block]

    def named(self, digest: bytes) -> int | None:
        """The block that carries this digest, whatever it holds: a candidate, not yet a hit."""
        return self.shards[(digest[0] << 8 | digest[1]) & self._shard_mask].get(digest)

    def is_same(self, block: int, packed_tokens: bytes, parent: int) -> bool:
        """Whether the block truly holds these tokens under this parent. Digests are never trusted alone."""
        end = (block + 1) * self._record_width
        return self.parents[block] == parent and self.records[end - self._width : end] == packed_tokens

    def find(self, digest: bytes, packed_tokens: bytes, parent: int) -> int | None:
        """The block to reuse for these tokens after this parent, if there is one."""
        block = self.named(digest)
        return block if block is not None and self.is_same(block, packed_tokens, parent) else None

    def name(self, blocks: Sequence[int], digests: Sequence[bytes], packed_tokens: bytes, parent: int) -> int:
        """Make a chain of written blocks hittable, each under the one before, the first as `parent`'s newest child.

        Stops at a digest that another block carries. Returns how many blocks got their names.
        """
        if not parent or (parent > 0 and not self.parents[parent]):
            rule = f"name: expected the parent {parent} of block {blocks[0]} to be a root or a named block"
            raise InvariantError(rule, code="parent_not_named")
        shards, mask, records, parents = self.shards, self._shard_mask, self.records, self.parents
        newer, older, first_child = self._newer, self._older, self.first_children
        record_width, width = self._record_width, self._width
        at = 0
        for index, (block, digest) in enumerate(zip(blocks, digests, strict=True)):
            shard = shards[(digest[0] << 8 | digest[1]) & mask]
            if digest in shard:
                return index
            if parents[block]:
                raise InvariantError(f"name: block {block} is named already", code="block_named_already")
            shard[digest] = block
            start = block * record_width
            records[start : start + record_width] = digest + packed_tokens[at : at + width]
            at += width
            parents[block] = parent
            newer[block] = 0
            if index:
                # Its parent has just been named: it has no other child.
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
        """Take these blocks out of the tree, each a leaf by its turn; their digests are remembered as evicted."""
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
            after, before = newer[block], older[block]
            if before:
                newer[before] = after
            if after:
                older[after] = before
            elif parent > 0:
                first_child[parent] = before
            else:
                self._set_first_child(parent, before)
                if not before:
                    self._drop_root_if_unused(parent)
        self.evictions.record(digests, now_s)
        return digests

    def clear(self) -> None:
        """Forget every name at once. Roots with open tables stay; nothing is remembered as evicted."""
        self.discarded += filter(None, self.shards)
        self._forget_all()
        self.evictions.clear()
        for slot, root in enumerate(self.root_nodes):
            if root is not None:
                root.first_child = 0
                self._drop_root_if_unused(~slot)

    def children(self, node: int) -> Iterator[int]:
        """Children of a block or a root, newest first."""
        child = self._first_child_of(node)
        while child:
            yield child
            child = self._older[child]

    def roots(self) -> Iterator[int]:
        """Every live root, for checks; a tenant at rest has one only while its blocks are cached."""
        return iter([~slot for slot in self._slot_of.values()])

    def copied(self, *, bare: bool = False) -> tuple[bytes, Sequence[int], Sequence[int], list[tuple[Namespace, int]]]:
        """Records (unless `bare`), first children, older siblings, roots with theirs, read while names come and go."""
        roots = [(root.namespace, root.first_child) for root in self.root_nodes if root is not None]
        return b"" if bare else bytes(self.records), self.first_children[:], self._older[:], roots

    def num_tables(self, root: int) -> int:
        """How many open tables keep this root."""
        return self._root(root).num_tables

    def _first_child_of(self, node: int) -> int:
        return self.first_children[node] if node > 0 else self._root(node).first_child

    def _set_first_child(self, node: int, child: int) -> None:
        if node > 0:
            self.first_children[node] = child
        else:
            self._root(node).first_child = child

    # -- why a prefix was not found ------------------------------------------------------------------------------------

    def divergence(
        self,
        namespace: Namespace,
        tokens: Sequence[int],
        in_flight: Container[bytes],
        now_s: float,
        slots: StateSlots | None = None,
        known: Sequence[bytes] = (),
    ) -> Divergence:
        """How far these tokens are cached, and the first reason of `MissReason` that holds for the next block.

        `slots` are those of a model with recurrent layers: the deepest block with a state is as far as a hit goes.
        `known` are digests of their first blocks that were made already: making them is most of the work.
        """
        packed = pack_tokens(tokens)
        cap = hit_cap(len(tokens), self.block_size)
        slot = self._slot_of.get(namespace)
        node = None if slot is None else ~slot
        digest = self.hasher.root(namespace)
        num_hits = num_usable = 0
        next_tokens = first_unusable = b""
        while num_hits < cap:
            next_tokens = packed[num_hits * self._width : (num_hits + 1) * self._width]
            digest = known[num_hits] if num_hits < len(known) else self.hasher.child(digest, next_tokens)
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
        if num_hits >= cap:
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
        """Of a block that never was behind `node`, as far as the tree remembers."""
        sibling = b"" if node is None else self._closest_sibling(node, next_tokens)
        if shared := num_shared_tokens(sibling, next_tokens):
            return Divergence(num_cached, MissReason.DIVERGED, num_cached + shared, unpack_tokens(sibling))
        other = None if num_cached else self._same_tokens_elsewhere(namespace, next_tokens)
        if other is not None:
            return Divergence(num_cached, MissReason.OTHER_NAMESPACE, other_namespace=other)
        return Divergence(num_cached, MissReason.FIRST_SEEN)

    def _closest_sibling(self, node: int, packed_tokens: bytes) -> bytes:
        """Of the newest children of `node`, the tokens of the one that shares most leading tokens with this block."""
        newest = (self.tokens_of(child) for child in islice(self.children(node), SIBLINGS_COMPARED))
        return max(newest, key=lambda tokens: num_shared_tokens(tokens, packed_tokens), default=b"")

    def _same_tokens_elsewhere(self, namespace: Namespace, packed_tokens: bytes) -> Namespace | None:
        """A namespace of the same cache group that has this first block: another model, adapter or format."""
        group = self.slots_of_group.get(namespace.cache_group, {})
        for slot, other in islice(reversed(group.items()), NAMESPACES_COMPARED):
            root = ~slot
            digest = self.hasher.child(self._root(root).digest, packed_tokens)
            if self.find(digest, packed_tokens, root) is not None:
                return other
        return None
