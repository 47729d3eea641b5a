"""The interface of the KV memory (pool, tables and tree). All other modules use it through these operations.

    open ─► match ─► reserve ─► [the step runs] ─► commit ─► … ─► release
              ▲         │                             │
              └─────────┴── again, as tokens become known ──┘

`match` looks up cached blocks and references them, in one operation. `reserve` allocates blocks for the tokens of the
next step, drafts included. `commit` receives how many of these tokens are valid; only then are full blocks named (added
to the prefix tree), so other sequences find only blocks with valid KV. Blocks without valid tokens are freed. `release`
frees all blocks of the table, last block first. This module never touches KV data: if a shared block must be written,
`reserve` plans a copy, and the runner makes it.

With recurrent layers, a table also has a state slot, and a hit ends at the deepest cached block with a cached state
(`state_slots`). The blocks after it are computed again; when full, they are replaced by the equal cached blocks.

Callers set the time with `advance`.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict

from quire.core.digests import BlockHasher, Namespace
from quire.core.divergence import Divergence
from quire.core.events import BlockStored, KVEvent
from quire.core.memory.block_names import BlockNames
from quire.core.memory.block_pool import BlockPool
from quire.core.memory.block_table import BlockTable, max_hit_blocks, num_blocks_for
from quire.core.memory.kv_config import KVMemoryConfig, MemoryCounters, MemoryStats
from quire.core.memory.kv_publisher import KVPublisher
from quire.core.memory.pins import Pin, Pins
from quire.core.memory.prefix_tree import PrefixTree
from quire.core.memory.state_slots import StateCheckpoint, StateSlots
from quire.core.memory.table_states import TableStates
from quire.core.step import BlockCopy
from quire.errors import InvariantError


class KVMemory:
    """Allocates blocks to sequences; sequences with equal prefixes share blocks. See the top of this file."""

    def __init__(
        self, config: KVMemoryConfig, hasher: BlockHasher, emit: Callable[[KVEvent], None] | None = None
    ) -> None:
        self.config = config
        self.now_s = 0.0
        self.pool = BlockPool(config.num_blocks)
        self.tree = PrefixTree(config.num_blocks, config.block_size, hasher, config.num_evictions_remembered)
        self.slots = StateSlots(config.num_slots, config.num_running_slots)
        self.tables: dict[int, BlockTable] = {}
        """Open tables by id, including those of pins."""
        self.in_flight = Counter[bytes]()
        """Digest -> number of tables in which the step in flight completes a block with this digest."""
        self.pins = Pins(config.num_blocks, config.pin_budget_blocks, config.max_pins)
        self.next_id = 1
        self._counters = MemoryCounters()
        self.states = None
        """The recurrent states of tables; None for a model without recurrent layers."""
        if config.num_slots:
            self.states = TableStates(self.slots, self.pool, config.pin_share)
        self._publisher = None
        if emit is not None:
            has_state = self.states is not None
            self._publisher = KVPublisher(emit, config.num_blocks, config.block_size, has_state=has_state)
        self.names = BlockNames(self.pool, self.tree, self.slots, self._counters, self._publisher)

    def advance(self, now_s: float) -> None:
        """Set the time, and end expired pins; each call frees a bounded number of their blocks."""
        self.now_s = self.names.now_s = now_s
        self.tree.sweep()
        self._end_expired_pins()

    # -- one sequence --------------------------------------------------------------------------------------------------

    def open(self, namespace: Namespace) -> BlockTable:
        """Open an empty table for a sequence of this namespace."""
        return self._register(self.tree.open_root(namespace))

    def reopen(self, namespace: Namespace) -> BlockTable:
        """Open a table for a preempted sequence or a pin, whose hits are not counted in the statistics."""
        table = self.open(namespace)
        table.is_counted = False
        return table

    def match(self, table: BlockTable, tokens: Sequence[int]) -> int:
        """Append the cached blocks that continue the table, and return the number of their tokens.

        `tokens` are all known tokens of the sequence; the last one is never a hit, because it must be computed. Returns
        0 if the table is in flight or ends inside a block.
        """
        max_blocks = max_hit_blocks(len(tokens), self.config.block_size)
        num_hit_tokens = self._match(table, tokens, max_blocks)
        if num_hit_tokens and self.states is not None:
            self.states.match(table)
        if table.is_counted:
            table.query_tokens += 0 if table.has_queried else len(tokens)
            table.query_hit_tokens += num_hit_tokens
            table.has_queried = True
        return num_hit_tokens

    def is_computing(self, table: BlockTable, tokens: Sequence[int]) -> bool:
        """Return whether the step in flight, or the one being planned, computes the next block of this table."""
        self._check_open(table)
        index = len(table.blocks)
        if table.num_computed != index * self.config.block_size or not table.is_naming:
            return False
        if index >= max_hit_blocks(len(tokens), self.config.block_size):
            return False
        self.names.drop_provisional_digests(table)
        self.names.extend_digests(table, tokens, index + 1)
        return table.digests[index] in self.in_flight

    def num_blocks_needed(self, table: BlockTable, num_tokens: int) -> int:
        """Return how many blocks `reserve` would allocate for `num_tokens` tokens, including a copied shared block."""
        self._check_open(table)
        end = num_blocks_for(table.num_computed + num_tokens, self.config.block_size)
        return max(0, end - len(table.blocks)) + (self._block_to_copy(table) is not None)

    def reserve(
        self,
        table: BlockTable,
        tokens: Sequence[int],
        num_tokens: int,
        drafts: Sequence[int] = (),
        keep: StateCheckpoint | None = None,
    ) -> BlockCopy | None:
        """Allocate blocks for the next `num_tokens` of the known `tokens` and for `drafts` after the last known token;
        returns the copy to make first, if any. With `keep`, the state after these tokens is cached if a slot is free.

        The table is in flight until `commit`. If too few blocks are free, raises OutOfBlocksError and changes nothing.
        """
        self._check_open(table)
        start, block_size = table.num_computed, self.config.block_size
        known_end = start + num_tokens
        end = known_end + len(drafts)
        self._check_reservable(table, len(tokens), known_end, end, keep)
        first_full, num_certain, num_full = start // block_size, known_end // block_size, end // block_size
        if len(table.digests) > first_full:
            self.names.drop_provisional_digests(table)
        if table.is_naming and num_full > first_full:
            self.names.extend_digests(table, [*tokens, *drafts] if drafts else tokens, num_full)
        source = self._block_to_copy(table)
        num_new_blocks = max(0, num_blocks_for(end, block_size) - len(table.blocks)) + (source is not None)
        new_blocks = self._allocate(num_new_blocks) if num_new_blocks else []
        copy = None
        if source is not None:
            # The source stays referenced until the step returns: a block being read must not be reallocated.
            copy = BlockCopy(source, new_blocks.pop())
            table.copy_source = source
            table.blocks[first_full] = copy.dst
            self._counters.num_block_copies += 1
        table.blocks += new_blocks
        if table.is_naming and num_certain > first_full:
            # Drafts may be rejected, so other sequences do not wait for blocks with drafts.
            table.in_flight_digests = table.digests[first_full:num_certain]
            self.in_flight.update(table.in_flight_digests)
        table.num_reserved = end
        if self.states is not None:
            self.states.reserve(table, keep)
        self._count_query(table)
        return copy

    def commit(self, table: BlockTable, num_tokens: int) -> int:
        """Finish the step for this table: the first `num_tokens` reserved tokens are valid; 0 if the row failed, fewer
        than all if drafts were rejected. Returns the number of blocks that were added to the prefix tree.

        Blocks that are now full are named (added to the prefix tree). If an equal block is already named, the table
        takes that block and frees its own. Blocks of a failed row or with a rejected draft are never named; those
        without any valid token are freed.
        """
        self._check_open(table)
        num_in_flight = table.num_reserved - table.num_computed
        if not 0 <= num_tokens <= num_in_flight or not num_in_flight:
            message = f"commit: expected at most {num_in_flight} tokens of table {table.table_id}, got {num_tokens}"
            raise InvariantError(message, code="commit_beyond_reserved")
        self._check_exclusive(table)
        if table.in_flight_digests:
            for digest in table.in_flight_digests:
                self.in_flight[digest] -= 1
                if not self.in_flight[digest]:
                    del self.in_flight[digest]
            table.in_flight_digests = []
        first_full = table.num_computed // self.config.block_size
        table.num_computed += num_tokens
        table.num_reserved = table.num_computed
        if table.copy_source is not None:
            self.pool.release((table.copy_source,))
            table.copy_source = None
        num_full, num_named = table.num_computed // self.config.block_size, 0
        if table.is_naming and num_full > first_full:
            num_named = self.names.name(table, first_full, num_full)
        if num_tokens < num_in_flight:
            self._free_unused(table)
        if self.states is not None and self.states.commit(table, is_whole=num_tokens == num_in_flight):
            self.names.publish_state(table)
        return num_named

    def fork(self, table: BlockTable, num_tokens: int) -> BlockTable:
        """Open a second table that shares the blocks of the first `num_tokens` computed tokens; no block is copied.

        The first table to write into a shared, partly filled block gets a copy of it from `reserve`. A recurrent state
        is copied at once, so for models with states `num_tokens` must be all computed tokens, or 0.
        """
        self._check_open(table)
        min_tokens = table.num_computed if self.states is not None and num_tokens else 0
        if table.is_in_flight or not min_tokens <= num_tokens <= table.num_computed:
            raise InvariantError(
                f"fork: expected table {table.table_id} between steps, with {num_tokens} computed tokens (or more, if "
                f"it has no state), got {table.num_computed}",
                code="cannot_fork_table",
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
        if self.states is not None and num_tokens:
            self.states.fork(table, child)
        return child

    def release(self, table: BlockTable) -> None:
        """Close the table and free its blocks, last block first. Closing a closed table does nothing."""
        if not table.is_open:
            return
        self._check_open(table)
        if table.is_in_flight:
            raise InvariantError(f"release: table {table.table_id} is written by the step in flight")
        self.pool.release(reversed(table.blocks))
        self.tree.close_root(table.root)
        if self.states is not None:
            self.states.release(table)
        del self.tables[table.table_id]
        table.blocks = []
        table.is_open = False

    # -- the whole memory ----------------------------------------------------------------------------------------------

    def pin(self, namespace: Namespace, tokens: Sequence[int], expires_s: float, tenant: str = "") -> Pin:
        """Keep the cached blocks of this prefix until `expires_s`, at most for `max_pin_s`. A pin is a table that no
        sequence writes to. It is shortened to what the budget, and the tenant's share of it, allow."""
        table = self.reopen(namespace)
        try:
            self._match(table, tokens, len(tokens) // self.config.block_size)
        except BaseException:
            self.release(table)
            raise
        return self._pin(table, expires_s, tenant)

    def pin_table(self, source: BlockTable, num_tokens: int, expires_s: float, tenant: str) -> Pin:
        """Keep the named blocks among the first `num_tokens` tokens of a table, like `pin`, without a lookup."""
        self._check_open(source)
        num_blocks = min(num_tokens, source.num_computed) // self.config.block_size
        while num_blocks and not self.pool.named[source.blocks[num_blocks - 1]]:
            num_blocks -= 1
        self.tree.share_root(source.root)
        table = self._register(source.root)
        table.blocks = source.blocks[:num_blocks]
        for block in table.blocks:
            self.pool.retain(block)
        return self._pin(table, expires_s, tenant)

    def _pin(self, table: BlockTable, expires_s: float, tenant: str) -> Pin:
        pins, limit_s = self.pins, self.now_s + self.config.max_pin_s
        expires_s = expires_s if expires_s <= limit_s else limit_s
        if table.blocks and (held := pins.covering(tenant, table.blocks[-1], expires_s)) is not None:
            self.release(table)
            return held
        while (num_blocks := pins.num_fitting(tenant, table.blocks)) < len(table.blocks):
            if (pin_and_excess := pins.next_above_share(tenant)) is None:
                break
            pins.num_yielded += 1
            pin_id, num_excess = pin_and_excess
            # A shorter pin of a recurrent model has no state at its end, so it is useless.
            num_taken = min(num_excess, len(table.blocks) - num_blocks) if self.states is None else len(self.pool.named)
            self._free_pinned(pins.tables[pin_id], pins.shorten(pin_id, num_taken))
        if self.states is not None:
            num_blocks = self.states.num_pinnable(table.blocks[:num_blocks])
        self.pool.release(reversed(table.blocks[num_blocks:]))
        del table.blocks[num_blocks:]
        table.cut_digests(0)  # a pin is never extended
        table.num_computed = table.num_reserved = num_blocks * self.config.block_size
        if not num_blocks:
            self.release(table)
            return Pin(table.table_id, 0, expires_s)
        self.slots.pin_state(table.blocks[-1])
        for pin_id in pins.add(table, tenant, expires_s):
            self._end_pin(pin_id)
        return Pin(table.table_id, table.num_computed, expires_s)

    def unpin(self, pin: Pin) -> None:
        """End a pin early. Does nothing if the pin has already ended."""
        self._end_pin(pin.pin_id)

    def yield_pin(self) -> bool:
        """Let the pin nearest its end expire now and free its blocks, a bounded number of them in each call. Returns
        whether any blocks were freed from pins; another pin may hold the same blocks."""
        self.pins.num_yielded += self.pins.expire_next(self.now_s)
        return self._end_expired_pins()

    def _end_pin(self, pin_id: int) -> None:
        table = self.pins.drop(pin_id)
        if table is not None:
            self.slots.unpin_states(self.pins.select_unpinned(table.blocks))
            self.release(table)

    def _end_expired_pins(self) -> bool:
        has_ended = False
        for table, blocks in self.pins.take_expired(self.now_s):
            has_ended = True
            self._free_pinned(table, blocks)
        return has_ended

    def _free_pinned(self, table: BlockTable, blocks: list[int]) -> None:
        """Release the blocks that a pin lost, and its table if none is left."""
        self.slots.unpin_states(self.pins.select_unpinned(blocks))
        self.pool.release(blocks)
        if not table.blocks:
            self.release(table)

    def evict(self, num_blocks: int) -> int:
        """Evict up to this many least recently used cached blocks; returns how many were evicted."""
        blocks = self.pool.take_cached(num_blocks)
        if blocks:
            self.names.forget(blocks, self.now_s)
            self.pool.release(blocks)
        return len(blocks)

    def clear(self) -> None:
        """Evict the cached blocks of all tenants and drop all pins. Running sequences keep their blocks, unnamed."""
        for table in self.pins.drop_all():
            self.release(table)
        for table in self.tables.values():
            table.is_naming = table.is_naming and not table.blocks
        self.names.clear()

    def divergence(self, namespace: Namespace, tokens: Sequence[int], table: BlockTable | None = None) -> Divergence:
        """Return the reason for the first cache miss of this prompt. Changes nothing. `table` may be a table of the
        same tokens and namespace, whose digests are then reused."""
        slots = None if self.states is None else self.slots
        known_digests = () if table is None else table.digests
        return self.tree.divergence(namespace, tokens, self.in_flight, self.now_s, slots, known_digests)

    def stored_events(self) -> Iterator[BlockStored]:
        """Yield the current cache contents as `BlockStored` events, parents first; empty without a publisher. The
        contents are copied at the call, so the caller may iterate later, while blocks change."""
        return iter(()) if self._publisher is None else self._publisher.published_blocks(self.tree)

    def stats(self) -> MemoryStats:
        """Return a snapshot of counters and sizes."""
        pool, slots = self.pool, self.slots
        return MemoryStats(
            num_blocks=pool.num_blocks,
            num_referenced_blocks=pool.num_referenced,
            num_cached_blocks=pool.num_cached,
            num_blank_blocks=pool.num_blank,
            num_named_blocks=pool.num_named,
            num_pinned_blocks=self.pins.num_pinned_blocks,
            num_pins_yielded=self.pins.num_yielded,
            num_open_tables=len(self.tables),
            num_slots=slots.num_slots,
            num_cached_slots=slots.num_cached,
            num_slot_evictions=slots.num_evictions,
            usage=pool.num_referenced / pool.num_blocks,
            **asdict(self._counters),
        )

    # -- helpers -------------------------------------------------------------------------------------------------------

    def _register(self, root: int) -> BlockTable:
        table = BlockTable(self.next_id, root, self.config.block_size)
        self.tables[table.table_id] = table
        self.next_id += 1
        return table

    def _check_open(self, table: BlockTable) -> None:
        if self.tables.get(table.table_id) is not table:
            raise InvariantError(f"table {table.table_id} is not open in this memory", code="table_not_open")

    def _count_query(self, table: BlockTable) -> None:
        """Count a lookup once its sequence reserves blocks: a sequence that is not admitted repeats the lookup."""
        self._counters.query_tokens += table.query_tokens
        self._counters.hit_tokens += table.query_hit_tokens
        table.query_tokens = table.query_hit_tokens = 0

    def _check_reservable(
        self, table: BlockTable, num_known: int, known_end: int, end: int, keep: StateCheckpoint | None
    ) -> None:
        start, num_drafts = table.num_computed, end - known_end
        if table.num_reserved > start or not start < known_end <= num_known or (num_drafts and known_end < num_known):
            raise InvariantError(
                f"reserve: expected table {table.table_id} between steps, [{start}, {known_end}) in its {num_known} "
                f"known tokens, and {num_drafts} drafts only after the last of them",
                code="cannot_reserve_tokens",
            )
        if keep is not None and (end % self.config.block_size or self.states is None):
            message = f"reserve: expected to cache a state on a block border of a recurrent model, got position {end}"
            raise InvariantError(message, code="cannot_keep_state")
        if num_drafts and self.states is not None:
            raise InvariantError(
                f"reserve: expected no drafts with a recurrent state, got {num_drafts}; a state cannot be rolled back",
                code="drafts_with_state",
            )

    def _free_unused(self, table: BlockTable) -> None:
        """Free the blocks without a computed token, for example those of rejected drafts."""
        num_used = num_blocks_for(table.num_computed, self.config.block_size)
        unused = table.blocks[num_used:]
        del table.blocks[num_used:]
        self.pool.release(reversed(unused))

    def _check_exclusive(self, table: BlockTable) -> None:
        """Check that no block written by the step is shared or named (invariant 7). Raises InvariantError."""
        block_size, ref_count, named = self.config.block_size, self.pool.ref_count, self.pool.named
        end = num_blocks_for(table.num_reserved, block_size)
        for block in table.blocks[table.num_computed // block_size : end]:
            if ref_count[block] != 1 or named[block]:
                raise InvariantError(
                    f"commit: block {block} was written while it had {ref_count[block]} references"
                    + " and a name" * named[block],
                    code="shared_block_written",
                )

    def _match(self, table: BlockTable, tokens: Sequence[int], max_blocks: int) -> int:
        self._check_open(table)
        first = len(table.blocks)
        if table.is_in_flight or table.num_computed != first * self.config.block_size:
            return 0
        blocks = self.names.find_cached(table, tokens, max_blocks)
        if self.states is not None:
            blocks = self.states.usable_blocks(table, blocks)
        for block in blocks:
            self.pool.retain(block)
        table.blocks += blocks
        table.num_computed = table.num_reserved = len(table.blocks) * self.config.block_size
        return len(blocks) * self.config.block_size

    def _block_to_copy(self, table: BlockTable) -> int | None:
        """Return the partly filled block for the next token if it is shared or named, so that it must be copied."""
        index, offset = divmod(table.num_computed, self.config.block_size)
        if not offset:
            return None
        block = table.blocks[index]
        return block if self.pool.ref_count[block] > 1 or self.pool.named[block] else None

    def _allocate(self, count: int) -> list[int]:
        allocation = self.pool.allocate(count)
        if allocation.evicted:
            self.names.forget(allocation.evicted, self.now_s)
        return allocation.blocks
