"""Bugs of the kinds that have broken other servers' block managers, one small change each."""

from tests.mutants.kill import Mutant

TESTS = ("tests/unit/core", "tests/property/test_kv_memory.py")

POOL = "core/memory/block_pool.py"
TABLE = "core/memory/block_table.py"
DIGESTS = "core/digests.py"
TREE = "core/memory/prefix_tree.py"
PINS = "core/memory/pins.py"
MEMORY = "core/memory/kv_memory.py"
NAMES = "core/memory/block_names.py"
ANNOUNCER = "core/memory/kv_publisher.py"

MUTANTS = [
    # -- the pool --
    Mutant("a dropped decref", POOL, "BlockPool.release", "ref_count[block] = count", "ref_count[block] = count + 1"),
    Mutant("a double release unnoticed", POOL, "BlockPool.release", "if count < 0:", "if count < -1:"),
    Mutant(
        "a foreign block released",
        POOL,
        "BlockPool.release",
        "if 0 < block <= num_blocks else -1",
        "if block <= num_blocks else -1",
    ),
    Mutant("revived without leaving the free queue", POOL, "BlockPool.retain", "self._unlink(block)", ""),
    Mutant("revived and still counted free", POOL, "BlockPool.retain", "self.num_cached -= 1", ""),
    Mutant("a forgotten block revived", POOL, "BlockPool.retain", "if not self.named[block]:", "if False:"),
    Mutant(
        "the newest cached block is taken first",
        POOL,
        "BlockPool.release",
        "before, after = prev[NULL_BLOCK], NULL_BLOCK",
        "before, after = self._border, next_[self._border]",
    ),
    Mutant(
        "blank blocks queue behind cached ones",
        POOL,
        "BlockPool.release",
        "before, after = NULL_BLOCK, next_[NULL_BLOCK]",
        "before, after = prev[NULL_BLOCK], NULL_BLOCK",
    ),
    Mutant(
        "cached blocks are taken before blank ones",
        POOL,
        "BlockPool.allocate",
        "num_blank = min(count, self.num_blank)",
        "num_blank = max(0, count - self.num_cached)",
    ),
    Mutant(
        "evicted blocks keep their names",
        POOL,
        "BlockPool.allocate",
        "Allocation(blocks + evicted, evicted)",
        "Allocation(blocks + evicted, [])",
    ),
    Mutant("the queue's back link is stale", POOL, "BlockPool._take_after", "self.prev_free[after] = sentinel", ""),
    Mutant(
        "blocks unnamed at once are not counted", POOL, "BlockPool.unname_all", "self.num_blank += self.num_cached", ""
    ),
    Mutant("eviction on demand is not counted", POOL, "BlockPool.take_cached", "self.num_cached -= len(blocks)", ""),
    Mutant(
        "one block too many is handed out",
        POOL,
        "BlockPool.allocate",
        "if count > self.num_free:",
        "if count > self.num_free + 1:",
    ),
    # -- the tree --
    Mutant("a stale digest", TREE, "PrefixTree.forget", "del shards[(digest[0] << 8 | digest[1]) & mask][digest]", ""),
    Mutant(
        "the digest is trusted alone",
        TREE,
        "PrefixTree.is_same",
        "self.parents[block] == parent and self.records[end - self._width : end] == packed_tokens",
        "self.parents[block] == parent",
    ),
    Mutant(
        "the parent is not compared", TREE, "PrefixTree.is_same", "return self.parents[block] == parent and", "return"
    ),
    Mutant("the cache group is not in the name", DIGESTS, "Namespace.encode", "astuple(self)]", "astuple(self)[:-1]]"),
    Mutant(
        "fields run into each other", DIGESTS, "Namespace.encode", 'len(field).to_bytes(8, "little") + field', "field"
    ),
    Mutant(
        "digests are not chained",
        DIGESTS,
        "BlockHasher.child",
        "state.update(parent_digest + packed_tokens)",
        "state.update(packed_tokens)",
    ),
    Mutant(
        "the key is not used",
        DIGESTS,
        "BlockHasher.__init__",
        'key=key, person=b"quire.block"',
        'person=b"quire.block"',
    ),
    Mutant(
        "an inner block is forgotten",
        TREE,
        "PrefixTree.forget",
        "if first_child[block] or not parent:",
        "if not parent:",
    ),
    Mutant(
        "a child is named before its parent",
        TREE,
        "PrefixTree.name",
        "if not parent or (parent > 0 and not self.parents[parent]):",
        "if False:",
    ),
    Mutant("a block is named twice", TREE, "PrefixTree.name", "if parents[block]:", "if False:"),
    Mutant("a taken name is given again", TREE, "PrefixTree.name", "if digest in shard:", "if False:"),
    Mutant(
        "older siblings are lost",
        TREE,
        "PrefixTree.name",
        "sibling = older[block] = self._first_child_of(parent)",
        "sibling = older[block] = 0",
    ),
    Mutant(
        "a namespace is kept for ever",
        TREE,
        "PrefixTree._drop_root_if_unused",
        "if record.num_tables == 0 and",
        "if False and",
    ),
    Mutant("evictions are not remembered", TREE, "PrefixTree.forget", "self.evictions.record(digests, now_s)", ""),
    Mutant("the eviction log grows", TREE, "EvictionLog.record", "if len(self._young) >= self._size:", "if False:"),
    Mutant(
        "another tenant explains a miss",
        TREE,
        "PrefixTree._same_tokens_elsewhere",
        "self.slots_of_group.get(namespace.cache_group, {})",
        "{s: n for g in self.slots_of_group.values() for s, n in g.items()}",
    ),
    Mutant(
        "the divergence is one token off",
        TREE,
        "PrefixTree._divergence_of_new",
        "num_cached + shared, unpack",
        "num_cached + shared + 1, unpack",
    ),
    Mutant(
        "a block in flight reads as first seen", TREE, "PrefixTree.divergence", "if digest in in_flight:", "if False:"
    ),
    # -- tables --
    Mutant(
        "a full hit leaves nothing to compute",
        TABLE,
        "max_hit_blocks",
        "(num_tokens - 1) // block_size",
        "num_tokens // block_size",
    ),
    Mutant(
        "off by one in the last block",
        TABLE,
        "num_blocks_for",
        "return -(-num_tokens // block_size)",
        "return num_tokens // block_size + 1",
    ),
    Mutant(
        "token ids lose their order",
        TABLE,
        "pack_tokens",
        'packed = array("I", tokens)',
        'packed = array("I", sorted(tokens))',
    ),
    # -- pins --
    Mutant(
        "pins have no budget",
        PINS,
        "Pins.num_fitting",
        "if num_left < 0 or num_left_of_tenant < 0:",
        "if num_left_of_tenant < 0 and self.num_of_tenant:",
    ),
    Mutant(
        "a pin ends one moment late",
        PINS,
        "Pins.take_expired",
        "self._expiries[0][0] <= now_s",
        "self._expiries[0][0] < now_s",
    ),
    Mutant(
        "a tenant has no share of the pins",
        PINS,
        "Pins.num_fitting",
        "if num_left < 0 or num_left_of_tenant < 0:",
        "if num_left < 0:",
    ),
    Mutant("unpinned blocks stay counted", PINS, "Pins._uncount", "self.pin_count[block] -= 1", ""),
    Mutant(
        "all pins end in one step", PINS, "Pins.take_expired", "num_left = UNPIN_BLOCKS_AT_ONCE", "num_left = 1 << 30"
    ),
    # -- the memory --
    Mutant(
        "named before written",
        MEMORY,
        "KVMemory.reserve",
        "table.num_reserved = end",
        "table.num_reserved = end\nself.names.name(table, table.num_computed // block_size, end // block_size)",
    ),
    Mutant(
        "a failed row is named",
        MEMORY,
        "KVMemory.commit",
        "table.num_computed += num_tokens",
        "table.num_computed = table.num_reserved",
    ),
    Mutant(
        "a hit is not held",
        MEMORY,
        "KVMemory._match",
        "self.pool.retain(block)",
        "pass",
    ),
    Mutant("a shared tail is written in place", MEMORY, "KVMemory._block_to_copy", "if not offset:", "if True:"),
    Mutant(
        "a named block is written in place",
        MEMORY,
        "KVMemory._block_to_copy",
        "or self.pool.named[block] else None",
        "else None",
    ),
    Mutant(
        "the source of a copy is free before the copy is made",
        MEMORY,
        "KVMemory.reserve",
        "table.copy_source = source",
        "self.pool.release((source,))",
    ),
    Mutant(
        "the source of a copy is never released",
        MEMORY,
        "KVMemory.commit",
        "self.pool.release((table.copy_source,))",
        "",
    ),
    Mutant(
        "released parents first",
        MEMORY,
        "KVMemory.release",
        "self.pool.release(reversed(table.blocks))",
        "self.pool.release(table.blocks)",
    ),
    Mutant("an adopted block is not held", NAMES, "BlockNames._adopt_named", "self._pool.retain(cached_block)", ""),
    Mutant(
        "the block given up is kept", NAMES, "BlockNames._adopt_named", "self._pool.release((table.blocks[index],))", ""
    ),
    Mutant(
        "a fork does not hold its blocks",
        MEMORY,
        "KVMemory.fork",
        "self.pool.retain(block)",
        "pass",
    ),
    Mutant(
        "a fork misses the partial tail",
        MEMORY,
        "KVMemory.fork",
        "table.blocks[: num_blocks_for(num_tokens, self.config.block_size)]",
        "table.blocks[: num_tokens // self.config.block_size]",
    ),
    Mutant(
        "a fork names below unnamed blocks",
        MEMORY,
        "KVMemory.fork",
        "child.is_naming = num_full == 0 or",
        "child.is_naming = True or",
    ),
    Mutant("naming goes on after a collision", NAMES, "BlockNames.name", "table.is_naming = False", ""),
    Mutant(
        "naming goes on after a clear",
        MEMORY,
        "KVMemory.clear",
        "table.is_naming = table.is_naming and not table.blocks",
        "pass",
    ),
    Mutant(
        "a digest stays in flight",
        MEMORY,
        "KVMemory.commit",
        "self.in_flight[digest] -= 1",
        "self.in_flight[digest] -= 0",
    ),
    Mutant(
        "tokens that changed keep their digests",
        NAMES,
        "BlockNames.drop_provisional_digests",
        "if len(table.digests) > num_full:",
        "if False:",
    ),
    Mutant(
        "a failed match forgets what it holds",
        NAMES,
        "BlockNames.find_cached",
        "blocks.append(block)",
        "self._pool.retain(block)\nblocks.append(block)",
    ),
    Mutant(
        "events name the wrong parent",
        ANNOUNCER,
        "KVPublisher._stored",
        "parent = table.digests[first - 1] if",
        "parent = table.digests[0] if",
    ),
    Mutant(
        "a resumed sequence counts its own blocks as hits", MEMORY, "KVMemory.reopen", "table.is_counted = False", ""
    ),
    Mutant(
        "the older of two evictions is told",
        TREE,
        "EvictionLog.evicted_at_s",
        "return self._old.get(digest) if time_s is None else time_s",
        "return self._old.get(digest, time_s)",
    ),
    Mutant(
        "half of the evictions are forgotten early",
        TREE,
        "EvictionLog.record",
        "self._old, self._young = self._young, {}",
        "self._old, self._young = {}, {}",
    ),
    Mutant("a clear reads as an eviction", TREE, "PrefixTree.clear", "self.evictions.clear()", ""),
    Mutant(
        "only the newest sibling is looked at",
        TREE,
        "SIBLINGS_COMPARED",
        "SIBLINGS_COMPARED = 16",
        "SIBLINGS_COMPARED = 2",
    ),
    Mutant(
        "only the newest namespace is looked at",
        TREE,
        "NAMESPACES_COMPARED",
        "NAMESPACES_COMPARED = 16",
        "NAMESPACES_COMPARED = 1",
    ),
    Mutant(
        "used after release",
        MEMORY,
        "KVMemory._check_open",
        "if self.tables.get(table.table_id) is not table:",
        "if False:",
    ),
    Mutant(
        "released while being written",
        MEMORY,
        "KVMemory.release",
        'if table.is_in_flight:\nraise InvariantError(f"release',
        'if False:\n    raise InvariantError(f"release',
    ),
    Mutant("a write into a shared block unnoticed", MEMORY, "KVMemory.commit", "self._check_exclusive(table)", ""),
    Mutant("a release leaves the table open", MEMORY, "KVMemory.release", "del self.tables[table.table_id]", ""),
    Mutant(
        "a query is counted twice", MEMORY, "KVMemory.match", "0 if table.has_queried else len(tokens)", "len(tokens)"
    ),
    # -- what who comes late is told --
    Mutant("a late router hears of one child alone", ANNOUNCER, "_Walk.events", "if self.older[block]:", "if False:"),
    Mutant(
        "a late router hears of no branch",
        ANNOUNCER,
        "_Walk.events",
        "if child := self.first_children[run[-1]]:",
        "if child := 0:",
    ),
    Mutant(
        "a late router gets a run over a branch",
        ANNOUNCER,
        "_Walk._run_from",
        "not child or self.older[child] or",
        "not child or",
    ),
    Mutant(
        "a late router hears what cannot be hit",
        ANNOUNCER,
        "_Walk._run_from",
        "self.published is None or self.published[block]",
        "True",
    ),
    Mutant(
        "a late router reads what is true later",
        TREE,
        "PrefixTree.copy",
        "self.first_children[:], self._older[:]",
        "self.first_children, self._older",
    ),
]
