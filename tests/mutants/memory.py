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
FLIGHT = "core/memory/in_flight.py"
ANNOUNCER = "core/memory/kv_publisher.py"
TOLD = "core/memory/kv_dump.py"

MUTANTS = [
    # -- the pool --
    Mutant("a dropped decref", POOL, "ref_count[block] = count\n", "ref_count[block] = count + 1\n"),
    Mutant("a double release unnoticed", POOL, "if count < 0:", "if count < -1:"),
    Mutant("a foreign block released", POOL, "if 0 < block <= num_blocks else -1", "if block <= num_blocks else -1"),
    Mutant("revived without leaving the free queue", POOL, "            self._unlink(block)\n", ""),
    Mutant("revived and still counted free", POOL, "            self.num_cached -= 1\n", ""),
    Mutant("a forgotten block revived", POOL, "if not self.named[block]:\n", "if False:\n"),
    Mutant(
        "the newest cached block is taken first",
        POOL,
        "left, right = prev[NULL_BLOCK], NULL_BLOCK",
        "left, right = self._border, next_[self._border]",
    ),
    Mutant(
        "blank blocks queue behind cached ones",
        POOL,
        "left, right = NULL_BLOCK, next_[NULL_BLOCK]",
        "left, right = prev[NULL_BLOCK], NULL_BLOCK",
    ),
    Mutant(
        "cached blocks are taken before blank ones",
        POOL,
        "num_blank = min(count, self.num_blank)",
        "num_blank = max(0, count - self.num_cached)",
    ),
    Mutant(
        "evicted blocks keep their names",
        POOL,
        "Allocation(blocks + evicted, evicted)",
        "Allocation(blocks + evicted, [])",
    ),
    Mutant("the queue's back link is stale", POOL, "        self._prev[after] = sentinel\n", ""),
    Mutant("blocks unnamed at once are not counted", POOL, "        self.num_blank += self.num_cached\n", ""),
    Mutant("eviction on demand is not counted", POOL, "        self.num_cached -= len(taken)\n", ""),
    Mutant("one block too many is handed out", POOL, "if count > self.num_free:", "if count > self.num_free + 1:"),
    # -- the tree --
    Mutant("a stale digest", TREE, "            del shards[(digest[0] << 8 | digest[1]) & mask][digest]\n", ""),
    Mutant(
        "the digest is trusted alone",
        TREE,
        "self._parent[block] == parent and self._records[end - self._width : end] == packed_tokens",
        "self._parent[block] == parent",
    ),
    Mutant("the parent is not compared", TREE, "return self._parent[block] == parent and ", "return "),
    Mutant("the cache group is not in the name", DIGESTS, "astuple(self)]", "astuple(self)[:-1]]"),
    Mutant("fields run into each other", DIGESTS, 'len(field).to_bytes(8, "little") + field', "field"),
    Mutant(
        "digests are not chained", DIGESTS, "state.update(parent_digest + packed_tokens)", "state.update(packed_tokens)"
    ),
    Mutant("the key is not used", DIGESTS, 'key=key, person=b"quire.block"', 'person=b"quire.block"'),
    Mutant("an inner block is forgotten", TREE, "if first_child[block] or not parent:", "if not parent:"),
    Mutant(
        "a child is named before its parent",
        TREE,
        "if not parent or (parent > 0 and not self._parent[parent]):",
        "if False:",
    ),
    Mutant("a block is named twice", TREE, "            if parents[block]:\n", "            if False:\n"),
    Mutant("a taken name is given again", TREE, "            if digest in shard:\n", "            if False:\n"),
    Mutant(
        "older siblings are lost",
        TREE,
        "sibling = older[block] = self._first_child_of(parent)",
        "sibling = older[block] = 0",
    ),
    Mutant("a namespace is kept for ever", TREE, "if record.num_tables == 0 and", "if False and"),
    Mutant("evictions are not remembered", TREE, "        self.evictions.record(digests, now_s)\n", ""),
    Mutant("the eviction log grows", TREE, "if len(self._young) >= self._size:", "if False:"),
    Mutant(
        "another tenant explains a miss",
        TREE,
        "self._slots_of_group.get(namespace.cache_group, {})",
        "{s: n for g in self._slots_of_group.values() for s, n in g.items()}",
    ),
    Mutant("the divergence is one token off", TREE, "num_cached + shared, unpack", "num_cached + shared + 1, unpack"),
    Mutant("a block in flight reads as first seen", TREE, "if digest in in_flight:", "if False:"),
    # -- tables --
    Mutant("a full hit leaves nothing to compute", TABLE, "(num_tokens - 1) // block_size", "num_tokens // block_size"),
    Mutant(
        "off by one in the last block",
        TABLE,
        "return -(-num_tokens // block_size)",
        "return num_tokens // block_size + 1",
    ),
    Mutant("token ids lose their order", TABLE, 'packed = array("I", tokens)', 'packed = array("I", sorted(tokens))'),
    # -- pins --
    Mutant("pins have no budget", PINS, "if self.num_pinned_blocks + num_fresh > self.budget_blocks:", "if False:"),
    Mutant("a pin ends one moment late", PINS, "self._expiries[0][0] <= now_s", "self._expiries[0][0] < now_s"),
    Mutant("unpinned blocks stay counted", PINS, "            self.pin_count[block] -= 1\n", ""),
    Mutant("all pins end in one step", PINS, "num_left = UNPIN_BLOCKS_AT_ONCE", "num_left = 1 << 30"),
    # -- the memory --
    Mutant(
        "named before written",
        MEMORY,
        "        table.num_reserved = end\n",
        "        table.num_reserved = end\n"
        "        self.names.name(table, table.num_computed // block_size, end // block_size)\n",
    ),
    Mutant(
        "a failed row is named", MEMORY, "table.num_computed += num_tokens", "table.num_computed = table.num_reserved"
    ),
    Mutant(
        "a hit is not held",
        MEMORY,
        "            self.pool.retain(block)\n        table.blocks += blocks\n",
        "            pass\n        table.blocks += blocks\n",
    ),
    Mutant("a shared tail is written in place", MEMORY, "        if not offset:\n", "        if True:\n"),
    Mutant("a named block is written in place", MEMORY, " or self.pool.named[block] else None", " else None"),
    Mutant(
        "the source of a copy is free before the copy is made",
        MEMORY,
        "            table.copy_source = source\n",
        "            self.pool.release((source,))\n",
    ),
    Mutant(
        "the source of a copy is never released", MEMORY, "            self.pool.release((table.copy_source,))\n", ""
    ),
    Mutant(
        "released parents first", MEMORY, "self.pool.release(reversed(table.blocks))", "self.pool.release(table.blocks)"
    ),
    Mutant("an adopted block is not held", NAMES, "            self._pool.retain(named)\n", ""),
    Mutant("the block given up is kept", NAMES, "            self._pool.release((table.blocks[index],))\n", ""),
    Mutant(
        "a fork does not hold its blocks",
        MEMORY,
        "            self.pool.retain(block)\n        child",
        "            pass\n        child",
    ),
    Mutant(
        "a fork misses the partial tail",
        MEMORY,
        "table.blocks[: num_blocks_for(num_tokens, self.config.block_size)]",
        "table.blocks[: num_tokens // self.config.block_size]",
    ),
    Mutant(
        "a fork names below unnamed blocks", MEMORY, "child.is_naming = num_full == 0 or ", "child.is_naming = True or "
    ),
    Mutant("naming goes on after a collision", NAMES, "            table.is_naming = False\n", ""),
    Mutant(
        "naming goes on after a clear",
        MEMORY,
        "            table.is_naming = table.is_naming and not table.blocks\n",
        "            pass\n",
    ),
    Mutant("a digest stays in flight", FLIGHT, "count = self.pop(digest) - 1", "count = self.pop(digest)"),
    Mutant(
        "tokens that changed keep their digests",
        NAMES,
        "        if len(table.digests) > num_full:\n",
        "        if False:\n",
    ),
    Mutant(
        "a failed match forgets what it holds",
        NAMES,
        "            found.append(block)\n",
        "            self._pool.retain(block)\n            found.append(block)\n",
    ),
    Mutant(
        "events name the wrong parent",
        ANNOUNCER,
        "parent_digest=table.digests[first - 1] if",
        "parent_digest=table.digests[0] if",
    ),
    Mutant("a resumed sequence counts its own blocks as hits", MEMORY, "        table.is_counted = False\n", ""),
    Mutant(
        "the older of two evictions is told",
        TREE,
        "return self._old.get(digest) if at_s is None else at_s",
        "return self._old.get(digest, at_s)",
    ),
    Mutant(
        "half of the evictions are forgotten early",
        TREE,
        "self._old, self._young = self._young, {}",
        "self._old, self._young = {}, {}",
    ),
    Mutant("a clear reads as an eviction", TREE, "        self.evictions.clear()\n", ""),
    Mutant("only the newest sibling is looked at", TREE, "SIBLINGS_COMPARED = 16", "SIBLINGS_COMPARED = 2"),
    Mutant("only the newest namespace is looked at", TREE, "NAMESPACES_COMPARED = 16", "NAMESPACES_COMPARED = 1"),
    Mutant("used after release", MEMORY, "if self.tables.get(table.table_id) is not table:", "if False:"),
    Mutant(
        "released while being written",
        MEMORY,
        '        if table.is_in_flight:\n            raise InvariantError(f"release',
        '        if False:\n            raise InvariantError(f"release',
    ),
    Mutant("a write into a shared block unnoticed", MEMORY, "        self._check_exclusive(table)\n", ""),
    Mutant("a release leaves the table open", MEMORY, "        del self.tables[table.table_id]\n", ""),
    Mutant("a query is counted twice", MEMORY, "0 if table.has_queried else len(tokens)", "len(tokens)"),
    # -- what who comes late is told --
    Mutant("a late router hears of one child alone", TOLD, "if self._older[block]:", "if False:"),
    Mutant("a late router hears of no branch", TOLD, "if child := self._first_child[run[-1]]:", "if child := 0:"),
    Mutant("a late router gets a run over a branch", TOLD, "not child or self._older[child] or", "not child or"),
    Mutant("a late router hears what cannot be hit", TOLD, "self._published is None or self._published[block]", "True"),
    Mutant(
        "a late router reads what is true later",
        TREE,
        "self._first_child[:], self._older[:]",
        "self._first_child, self._older",
    ),
]
