"""The one face of pool, tables and tree. Everything that touches KV memory goes through the verbs of this file.

    open ─► match ─► reserve ─► [the step runs] ─► commit ─► … ─► release
              ▲         │                             │
              └─────────┴── again, as tokens become known ──┘

`match` takes the cached blocks and holds them, in one operation. `reserve` gets blocks for the tokens the next step
will compute, drafts among them. `commit` tells how much of that the step has made true; only then do full blocks get
names, so a block is visible only when it is true, and blocks that came to nothing are given back. `release` gives
everything back, last block first. Nothing here touches KV data: where a shared block must be written, `reserve` plans
the copy and the runner makes it.

Time is handed in by `advance`, never read.
"""

from collections.abc import Callable, Sequence

from quire.core.block_pool import BlockPool
from quire.core.block_table import BlockTable, hit_cap, num_blocks_for
from quire.core.digests import BlockHasher, Namespace
from quire.core.events import AllBlocksCleared, BlockRemoved, KVEvent
from quire.core.kv_config import Block, KVMemoryConfig, MemoryStats
from quire.core.memory_view import MemoryCounters, block_view, memory_stats, stored_event
from quire.core.pins import Pin, Pins
from quire.core.prefix_tree import Divergence, PrefixTree
from quire.core.step import BlockCopy
from quire.errors import InvariantError


class KVMemory:
    """Blocks for sequences, shared by content. See the verbs at the top of this file."""

    def __init__(
        self, config: KVMemoryConfig, hasher: BlockHasher, emit: Callable[[KVEvent], None] | None = None
    ) -> None:
        self.config = config
        self.now_s = 0.0
        self.pool = BlockPool(config.num_blocks)
        self.tree = PrefixTree(config.num_blocks, config.block_size, hasher, config.num_evictions_remembered)
        self.tables: dict[int, BlockTable] = {}
        """Open tables by id; those of pins among them."""
        self.in_flight: dict[bytes, int] = {}
        """Digests that the step in flight completes, and by how many tables."""
        self.pins = Pins(config.num_blocks, config.pin_budget_blocks, config.max_pins)
        self._emit = emit
        """Called in the middle of operations: it must neither raise nor call back. Appending to a list is right."""
        self._next_id = 1
        self._counters = MemoryCounters()

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be taken now, cached ones included."""
        return self.pool.num_blank + self.pool.num_cached

    def advance(self, now_s: float) -> None:
        """Tell the time. Pins that have run out are dropped, a bounded number of blocks at a time."""
        self.now_s = now_s
        self.tree.sweep()
        for table, blocks in self.pins.take_expired(now_s):
            self.pool.release(blocks)
            if not table.blocks:
                self.release(table)

    # -- one sequence --------------------------------------------------------------------------------------------------

    def open(self, namespace: Namespace) -> BlockTable:
        """An empty table for a sequence whose KV belongs to this namespace."""
        return self._register(self.tree.open_root(namespace))

    def reopen(self, namespace: Namespace) -> BlockTable:
        """The same for a sequence that has asked before: what it finds now is its own, and counts as no hit."""
        table = self.open(namespace)
        table.is_counted = False
        return table

    def match(self, table: BlockTable, tokens: Sequence[int]) -> int:
        """Extend the table by the cached blocks that follow, hold them, and return how many tokens that gave.

        `tokens` is all the sequence knows. At least its last token is left to compute. A table that stands inside a
        block, or already has blocks to write into, gets nothing.
        """
        cap = hit_cap(len(tokens), self.config.block_size)
        num_hit_tokens = self._match(table, tokens, cap)
        if table.is_counted:
            table.query_tokens += 0 if table.has_queried else len(tokens)
            table.query_hit_tokens += num_hit_tokens
            table.has_queried = True
        return num_hit_tokens

    def is_computing(self, table: BlockTable, tokens: Sequence[int]) -> bool:
        """Whether the next block this table could hit is being written by the step in flight or being planned."""
        self._check_open(table)
        index = len(table.blocks)
        if table.num_computed != index * self.config.block_size or not table.is_naming:
            return False
        if index >= hit_cap(len(tokens), self.config.block_size):
            return False
        self._forget_guesses(table)
        self._extend_digests(table, tokens, index + 1)
        return table.digests[index] in self.in_flight

    def num_blocks_needed(self, table: BlockTable, num_tokens: int) -> int:
        """How many blocks `reserve` would take for the next `num_tokens` tokens, a copy of a shared block included."""
        self._check_open(table)
        end = num_blocks_for(table.num_computed + num_tokens, self.config.block_size)
        return max(0, end - len(table.blocks)) + (self._block_to_copy(table) is not None)

    def reserve(
        self, table: BlockTable, tokens: Sequence[int], num_tokens: int, drafts: Sequence[int] = ()
    ) -> BlockCopy | None:
        """Get blocks for the next `num_tokens` of the known `tokens`, and for `drafts` behind the last of them; returns
        the copy to make first, if any.

        The table is in flight until `commit`. Raises OutOfBlocksError, with nothing changed, if the pool is short.
        """
        self._check_open(table)
        start, num_known, block_size = table.num_computed, len(tokens), self.config.block_size
        known_end = start + num_tokens
        if table.num_reserved > start or num_tokens < 1 or known_end > num_known or (drafts and known_end < num_known):
            raise InvariantError(
                f"reserve: table {table.table_id} must be at rest, [{start}, {known_end}) lie within the {num_known} "
                f"known tokens, and {len(drafts)} drafts behind the last of them"
            )
        end = known_end + len(drafts)
        first_full, num_certain, num_full = start // block_size, known_end // block_size, end // block_size
        self._forget_guesses(table)
        if table.is_naming and num_full > first_full:
            self._extend_digests(table, [*tokens, *drafts] if drafts else tokens, num_full)
        source = self._block_to_copy(table)
        num_taken = max(0, num_blocks_for(end, block_size) - len(table.blocks)) + (source is not None)
        taken = self._take(num_taken) if num_taken else []
        copy = None
        if source is not None:
            # The source stays held until the step has returned: a block being read must not be handed out.
            copy = BlockCopy(source, taken.pop())
            table.copy_source = source
            table.blocks[first_full] = copy.dst
            self._counters.num_block_copies += 1
        table.blocks += taken
        if table.is_naming and num_certain > first_full:
            # A block that holds drafts may come to nothing: nobody is told to wait for it.
            self._enter_flight(table, table.digests[first_full:num_certain])
        table.num_reserved = end
        # A query counts once the sequence goes on with what it found; one that did not fit will ask again.
        self._counters.query_tokens += table.query_tokens
        self._counters.hit_tokens += table.query_hit_tokens
        table.query_tokens = table.query_hit_tokens = 0
        return copy

    def commit(self, table: BlockTable, num_tokens: int) -> None:
        """The step has returned, and the first `num_tokens` of what was reserved are true: 0 if the row failed, fewer
        than all if drafts were wrong.

        Blocks that are now full get their names. Where an equal block is named already, the table takes that one and
        gives up its own. Blocks of a failed row, or with a wrong draft in them, are never named; those that hold
        nothing else are given back.
        """
        self._check_open(table)
        num_in_flight = table.num_reserved - table.num_computed
        if not 0 <= num_tokens <= num_in_flight or not num_in_flight:
            raise InvariantError(
                f"commit: table {table.table_id} has {num_in_flight} tokens in flight, {num_tokens} given"
            )
        self._check_exclusive(table)
        if table.in_flight_digests:
            self._leave_flight(table)
        first_full = table.num_computed // self.config.block_size
        table.num_computed += num_tokens
        table.num_reserved = table.num_computed
        if table.copy_source is not None:
            self.pool.release((table.copy_source,))
            table.copy_source = None
        num_full = table.num_computed // self.config.block_size
        if table.is_naming and num_full > first_full:
            self._name_blocks(table, first_full, num_full)
        if num_tokens < num_in_flight:
            self._give_back_unused(table)

    def fork(self, table: BlockTable, num_tokens: int) -> BlockTable:
        """A second table over the first `num_tokens` computed tokens: every block shared, none copied.

        Whoever first writes into a shared partial tail gets a copy of it from `reserve`.
        """
        self._check_open(table)
        if table.is_in_flight or not 0 <= num_tokens <= table.num_computed:
            raise InvariantError(
                f"fork: table {table.table_id} must be at rest with {num_tokens} tokens computed, it has "
                f"{table.num_computed}"
            )
        self.tree.share_root(table.root)
        child = self._register(table.root)
        child.blocks = table.blocks[: num_blocks_for(num_tokens, self.config.block_size)]
        for block in child.blocks:
            self.pool.retain(block)
        child.num_computed = child.num_reserved = num_tokens
        num_full = num_tokens // self.config.block_size
        child.is_naming = num_full == 0 or bool(self.pool.named[child.blocks[num_full - 1]])
        child.digests = table.digests[:num_full]
        child.packed_tokens = table.packed_tokens[: num_full * 4 * self.config.block_size]
        return child

    def release(self, table: BlockTable) -> None:
        """Give back everything the table holds, last block first. The only way out; the second call does nothing."""
        if not table.is_open:
            return
        self._check_open(table)
        if table.is_in_flight:
            raise InvariantError(f"release: table {table.table_id} is being written by the step in flight")
        self.pool.release(reversed(table.blocks))
        self.tree.close_root(table.root)
        del self.tables[table.table_id]
        table.blocks = []
        table.is_open = False

    # -- the whole memory ----------------------------------------------------------------------------------------------

    def pin(self, namespace: Namespace, tokens: Sequence[int], expires_s: float) -> Pin:
        """Keep what is cached of this prefix until `expires_s`. A pin is a table that no sequence writes to."""
        limit_s = self.now_s + self.config.max_pin_s
        expires_s = expires_s if expires_s <= limit_s else limit_s
        table = self.reopen(namespace)
        try:
            num_tokens = self._match(table, tokens, len(tokens) // self.config.block_size)
            if num_tokens:
                self.pins.hold(table, expires_s)
        finally:
            if table.table_id not in self.pins.tables:
                self.release(table)
        return Pin(table.table_id, num_tokens, expires_s)

    def unpin(self, pin: Pin) -> None:
        """Let go before the time. Doing it twice, or after the time, does nothing."""
        table = self.pins.drop(pin.pin_id)
        if table is not None:
            self.release(table)

    def evict(self, num_blocks: int) -> int:
        """Forget up to this many least recently used cached blocks; returns how many there were to forget."""
        taken = self.pool.take_cached(num_blocks)
        if taken:
            self._forget(taken)
            self.pool.release(taken)
        return len(taken)

    def clear(self) -> None:
        """Forget every cached block, for all tenants, and drop all pins. Sequences keep their blocks, unnamed."""
        for table in self.pins.drop_all():
            self.release(table)
        for table in self.tables.values():
            table.is_naming = table.is_naming and not table.blocks
        self.pool.unname_all()
        self.tree.clear()
        if self._emit is not None:
            self._emit(AllBlocksCleared())

    def divergence(self, namespace: Namespace, tokens: Sequence[int]) -> Divergence:
        """Why the next token of this prompt would not be reused. Changes nothing."""
        return self.tree.divergence(namespace, tokens, self.in_flight, self.now_s)

    def block(self, block_id: int) -> Block:
        """What is known of one block."""
        return block_view(block_id, self.pool, self.pins, self.tree)

    def stats(self) -> MemoryStats:
        """Counters and shares; walks the open tables, not the pool."""
        return memory_stats(self.pool, self.pins, self.tables.values(), self._counters, self.config.block_size)

    # -- leaves --------------------------------------------------------------------------------------------------------

    def _register(self, root: int) -> BlockTable:
        table = BlockTable(self._next_id, root, self.config.block_size)
        self.tables[table.table_id] = table
        self._next_id += 1
        return table

    def _check_open(self, table: BlockTable) -> None:
        if self.tables.get(table.table_id) is not table:
            raise InvariantError(f"table {table.table_id} is not open in this memory: released, or another memory's")

    def _give_back_unused(self, table: BlockTable) -> None:
        """Let go of the blocks that hold no computed token: kept, they would be a guess's hold on the pool."""
        num_used = num_blocks_for(table.num_computed, self.config.block_size)
        unused = table.blocks[num_used:]
        del table.blocks[num_used:]
        self.pool.release(reversed(unused))

    def _enter_flight(self, table: BlockTable, digests: list[bytes]) -> None:
        table.in_flight_digests = digests
        in_flight = self.in_flight
        for digest in digests:
            in_flight[digest] = in_flight.get(digest, 0) + 1

    def _leave_flight(self, table: BlockTable) -> None:
        in_flight = self.in_flight
        for digest in table.in_flight_digests:
            count = in_flight.pop(digest) - 1
            if count:
                in_flight[digest] = count
        table.in_flight_digests = []

    def _check_exclusive(self, table: BlockTable) -> None:
        """No block the step wrote is shared or named: promise 7, at the moment it would have been broken."""
        block_size, ref_count, named = self.config.block_size, self.pool.ref_count, self.pool.named
        last = num_blocks_for(table.num_reserved, block_size)
        for block in table.blocks[table.num_computed // block_size : last]:
            if ref_count[block] != 1 or named[block]:
                raise InvariantError(
                    f"commit: block {block} was written while it had {ref_count[block]} references"
                    + " and a name" * named[block]
                )

    def _match(self, table: BlockTable, tokens: Sequence[int], cap: int) -> int:
        self._check_open(table)
        index = first = len(table.blocks)
        if table.is_in_flight or table.num_computed != index * self.config.block_size:
            return 0
        self._forget_guesses(table)
        while index < cap:
            self._extend_digests(table, tokens, index + 1)
            block = self.tree.find(table.digests[index], table.tokens_of(index), table.parent_of(index))
            if block is None:
                break
            self.pool.retain(block)
            table.blocks.append(block)
            index += 1
            table.num_computed = table.num_reserved = index * self.config.block_size
        return (index - first) * self.config.block_size

    def _extend_digests(self, table: BlockTable, tokens: Sequence[int], num_blocks: int) -> None:
        """Let the table's digest chain reach over its first `num_blocks` full blocks."""
        table.extend_digests(tokens, num_blocks, self.tree.digest_of(table.root), self.tree.hasher.child)

    def _forget_guesses(self, table: BlockTable) -> None:
        """Names beyond what is computed were made from tokens that may have changed since: make them anew."""
        num_full = table.num_computed // self.config.block_size
        if len(table.digests) > num_full:
            table.cut_digests(num_full)

    def _block_to_copy(self, table: BlockTable) -> int | None:
        """The block the next token falls in, if it is partly filled and may not be written in place."""
        index, offset = divmod(table.num_computed, self.config.block_size)
        if not offset:
            return None
        block = table.blocks[index]
        return block if self.pool.ref_count[block] > 1 or self.pool.named[block] else None

    def _take(self, count: int) -> list[int]:
        allocation = self.pool.allocate(count)
        if allocation.evicted:
            self._forget(allocation.evicted)
        return allocation.blocks

    def _forget(self, blocks: Sequence[int]) -> None:
        """The tree forgets these cached blocks, which have just been taken: leaves come first."""
        digests = self.tree.forget(blocks, self.now_s)
        self.pool.unname(blocks)
        self._counters.num_evictions += len(digests)
        if self._emit is not None:
            self._emit(BlockRemoved(tuple(digests)))

    def _name_blocks(self, table: BlockTable, first: int, last: int) -> None:
        """Name the full blocks `first` to `last` of a table whose earlier ones are named."""
        first = self._adopt_named(table, first, last)
        if first == last:
            return
        width = 4 * self.config.block_size
        blocks, digests = table.blocks[first:last], table.digests[first:last]
        packed = bytes(table.packed_tokens[first * width : last * width])
        num_named = self.tree.name(blocks, digests, packed, table.parent_of(first))
        self.pool.name(blocks[:num_named])
        if num_named < len(blocks):
            self._counters.num_collisions += 1
            table.is_naming = False
        if self._emit is not None and num_named:
            namespace = self.tree.namespace_of(table.root)
            self._emit(stored_event(table, first, first + num_named, namespace, self.config.block_size))

    def _adopt_named(self, table: BlockTable, index: int, last: int) -> int:
        """Where an equal block is named already, take it and give up the own one; returns the first index without.

        Equal tokens after an equal prefix are equal KV, bit for bit: one copy is enough. Below a block that is new
        nothing can have been named before, so the equal ones come first.
        """
        while index < last:
            named = self.tree.find(table.digests[index], table.tokens_of(index), table.parent_of(index))
            if named is None:
                break
            self.pool.retain(named)
            self.pool.release((table.blocks[index],))
            table.blocks[index] = named
            index += 1
        return index
