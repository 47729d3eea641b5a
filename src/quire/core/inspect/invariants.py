"""The invariants of the KV memory and of the scheduler, as check functions.

`check(memory)` walks the whole pool, `check_scheduler(scheduler)` all waiting and running sequences. They are for
tests, proofs and idle time. What can be checked in O(1) is also checked by the operations themselves.
"""

from collections import Counter

from quire.core.memory.block_table import BlockTable, num_blocks_for
from quire.core.memory.kv_memory import KVMemory
from quire.core.scheduling.scheduler import Scheduler
from quire.core.scheduling.sequence import SequenceStatus
from quire.errors import InvariantError


def check(memory: KVMemory) -> None:
    """Check the whole KV memory. Raises InvariantError at the first violation."""
    _check_free_queue(memory)
    _check_references(memory)
    _check_names(memory)
    _check_roots(memory)
    for table in memory.tables.values():
        _check_table(memory, table)
    _check_pins(memory)
    _check_slots(memory)


def check_at_rest(memory: KVMemory) -> None:
    """Check a memory without live sequences: only pins reference blocks, and nothing is in flight."""
    check(memory)
    has_only_pins = set(memory.tables) == set(memory.pins.tables)
    _require(has_only_pins, f"at rest: tables {sorted(memory.tables)} are still open", "tables_still_open")
    _require(not memory.in_flight, f"at rest: {len(memory.in_flight)} digests are still in flight")
    _require(
        memory.pool.num_referenced == memory.pins.num_pinned_blocks,
        f"at rest: {memory.pool.num_referenced} blocks are referenced, {memory.pins.num_pinned_blocks} pinned",
    )
    num_free = len(memory.slots.blank_slots) + memory.slots.num_cached
    _require(num_free == memory.slots.num_slots, f"at rest: {memory.slots.num_slots - num_free} slots are in use")


def check_scheduler(scheduler: Scheduler) -> None:
    """Check that waiting and running sequences agree with the scheduler's counters and with the memory."""
    running, waiting = scheduler.running, list(scheduler.queue)
    keys = [sequence.key for sequence in running]
    _require(keys == sorted(keys), "running: not in order of urgency", "urgency_order_broken")
    for sequence in running:
        is_valid = sequence.status is SequenceStatus.RUNNING and sequence.table is not None
        _require(is_valid and sequence.num_uncomputed >= 1, f"running: sequence {sequence.sequence_id} cannot run")
    for sequence in waiting:
        is_valid = sequence.status is SequenceStatus.WAITING and sequence.table is None
        _require(is_valid, f"waiting: sequence {sequence.sequence_id} has blocks or runs")
    tables = {sequence.table.table_id for sequence in running if sequence.table is not None}
    _require(tables == set(scheduler.memory.tables) - set(scheduler.memory.pins.tables), "tables without a sequence")
    num_places = sum(1 + len(sequence.siblings) for sequence in running)
    _require(
        num_places == scheduler.placement.num_places,
        f"{scheduler.placement.num_places} places counted, {num_places} in use",
    )
    _require(num_places <= scheduler.config.max_running, f"{num_places} places in use: more than max_running")
    unforked = [sibling for sequence in (*running, *waiting) for sibling in sequence.siblings]
    actual = Counter(sequence.sequence_id for sequence in (*running, *waiting, *unforked))
    expected = Counter(
        sequence.sequence_id
        for record in scheduler.live.values()
        for sequence in record.sequences
        if sequence.status is not SequenceStatus.FINISHED
    )
    _require(actual == expected, "a sequence is not in exactly one list", "sequence_in_no_place")
    _check_tenants(scheduler)


def _check_tenants(scheduler: Scheduler) -> None:
    num_live: Counter[str] = Counter()
    for record in scheduler.live.values():
        num_live[record.request.tenant] += record.num_unfinished
    num_waiting = Counter(sequence.request.tenant for sequence in scheduler.queue)
    _check_places(scheduler)
    for tenant in scheduler.queue.tenants.values():
        counters = (tenant.num_live, tenant.num_waiting)
        actual = (num_live[tenant.name], num_waiting[tenant.name])
        message = f"tenant {tenant.name!r}: {counters} live and waiting counted, {actual} found"
        _require(counters == actual, message, "tenants_miscounted")


def _check_places(scheduler: Scheduler) -> None:
    """Check that each waiting request, unless preempted, has a queue place that is counted for its own tenant."""
    shares = scheduler.queue.shares
    owners = {
        sequence.request.request_id: sequence.request.tenant
        for sequence in scheduler.queue
        if sequence.num_preemptions == 0
    }
    tenant_of = {
        name: tenant
        for tenant, holder in shares.holders.items()
        for name in (*holder.promised_s, *(name for places in holder.places.values() for name in places))
    }
    _require(tenant_of == owners, f"{len(tenant_of)} places of the queue counted, {len(owners)} in use")
    _require(len(shares) == len(owners) == shares.num_taken + shares.num_promised, "places of the queue: wrong count")


def _require(condition: bool, message: str, code: str | None = None) -> None:
    if not condition:
        raise InvariantError(message, code=code)


def _check_free_queue(memory: KVMemory) -> None:
    """Invariants 1 and 3: exactly the unreferenced blocks are queued, blank ones first; the three states add up."""
    pool, parent_of = memory.pool, memory.tree.parent_of
    pool.check_links()
    position = {block: index for index, block in enumerate(pool.free_queue())}
    _require(len(position) == pool.num_free, f"free queue: {pool.num_free} counted, {len(position)} distinct blocks")
    num_cached = 0
    for block, index in position.items():
        _require(pool.ref_count[block] == 0, f"free queue: block {block} has {pool.ref_count[block]} references")
        if pool.named[block]:
            num_cached += 1
            # Invariant 4: a free parent is evicted after its children, so the oldest cached block is a leaf.
            parent = parent_of(block)
            is_ahead = parent > 0 and position.get(parent, index + 1) < index
            _require(not is_ahead, f"free queue: parent {parent} is ahead of its child {block}")
        else:
            _require(num_cached == 0, f"free queue: blank block {block} comes after a cached one")
    _require(num_cached == pool.num_cached, f"pool: {pool.num_cached} cached blocks counted, {num_cached} found")
    num_referenced = sum(1 for count in pool.ref_count[1 : pool.num_blocks + 1] if count)
    _require(num_referenced == pool.num_referenced, f"pool: {num_referenced} referenced, {pool.num_referenced} counted")
    _require(pool.ref_count[0] == 0, "pool: the null block is referenced")


def _check_references(memory: KVMemory) -> None:
    """Invariant 2: a block's reference count is the number of its table entries. Pins are tables, too."""
    uses: Counter[int] = Counter()
    for table in memory.tables.values():
        uses.update(table.blocks)
        if table.copy_source is not None:
            uses[table.copy_source] += 1
    ref_count = memory.pool.ref_count
    for block, count in uses.items():
        _require(ref_count[block] == count, f"block {block}: {ref_count[block]} references, {count} table entries")
    _require(len(uses) == memory.pool.num_referenced, f"{memory.pool.num_referenced} referenced, {len(uses)} used")


def _check_names(memory: KVMemory) -> None:
    """Invariant 4: digest and block map to each other, each digest matches its tokens, and every parent is named."""
    pool, tree = memory.pool, memory.tree
    num_named = 0
    for block in range(1, pool.num_blocks + 1):
        parent = tree.parent_of(block)
        _require(
            bool(parent) == bool(pool.named[block]), f"block {block}: tree and pool disagree on whether it is named"
        )
        if not parent:
            continue
        num_named += 1
        digest = tree.digest_of(block)
        _require(tree.named(digest) == block, f"block {block}: its digest leads to {tree.named(digest)}")
        _require(parent < 0 or bool(tree.parent_of(parent)), f"block {block}: its parent {parent} is not named")
        expected = tree.hasher.child(tree.digest_of(parent), tree.tokens_of(block))
        _require(digest == expected, f"block {block}: its digest is not that of its tokens under its parent")
    _require(num_named == pool.num_named, f"{pool.num_named} named blocks counted, {num_named} found")
    _require(num_named == len(tree), f"{len(tree)} names lead to {num_named} blocks")


def _check_roots(memory: KVMemory) -> None:
    """Check that every named block is once among its parent's children, and that every root is in use."""
    tree = memory.tree
    num_open = Counter(table.root for table in memory.tables.values())
    num_reached = 0
    for root in tree.roots():
        _require(tree.num_tables(root) == num_open[root], f"root {root}: {tree.num_tables(root)} tables counted")
        nodes = [root]
        while nodes:
            node = nodes.pop()
            for child in tree.children(node):
                _require(tree.parent_of(child) == node, f"block {child} is under {node}, not its parent")
                num_reached += 1
                nodes.append(child)
        _require(bool(num_open[root]) or any(tree.children(root)), f"root {root} is unused")
    _require(
        num_reached == memory.pool.num_named, f"{num_reached} blocks are in the tree, {memory.pool.num_named} named"
    )


def _check_table(memory: KVMemory, table: BlockTable) -> None:
    """Invariants 4, 5 and 7 for one table."""
    pool, tree, block_size = memory.pool, memory.tree, memory.config.block_size
    name = f"table {table.table_id}"
    num_needed = num_blocks_for(table.num_reserved, block_size)
    _require(len(table.blocks) == num_needed, f"{name}: {len(table.blocks)} blocks for {table.num_reserved} tokens")
    _require(table.num_computed <= table.num_reserved, f"{name}: computed beyond what was reserved")
    _require(len(set(table.blocks)) == len(table.blocks), f"{name}: contains a block twice")
    _require(table.is_in_flight or table.copy_source is None, f"{name}: has a copy source at rest")
    num_full = table.num_computed // block_size
    is_named_so_far = True
    for index, block in enumerate(table.blocks):
        named = bool(pool.named[block])
        _require(not named or is_named_so_far, f"{name}: block {block} is named after an unnamed one")
        if named and index <= num_full:
            _require(tree.parent_of(block) == table.parent_of(index), f"{name}: block {block} has another parent")
        _require(not named or index * block_size < table.num_computed, f"{name}: block {block} is named, not computed")
        _require(named or not table.is_naming or index >= num_full, f"{name}: full block {block} is not named")
        if index * block_size + block_size > table.num_computed and index < num_needed and table.is_in_flight:
            is_exclusive = pool.ref_count[block] == 1 and not named
            _require(is_exclusive, f"{name}: block {block} is being written and shared")
        is_named_so_far = named
    for digest in table.in_flight_digests:
        _require(digest in memory.in_flight, f"{name}: one of its digests in flight is not in flight in the memory")


def _check_pins(memory: KVMemory) -> None:
    counts = Counter(block for table in memory.pins.tables.values() for block in table.blocks)
    for block, count in counts.items():
        _require(
            memory.pins.pin_count[block] == count,
            f"block {block}: {memory.pins.pin_count[block]} pins counted, {count} found",
        )
    _require(
        len(counts) == memory.pins.num_pinned_blocks,
        f"{memory.pins.num_pinned_blocks} pinned blocks counted, {len(counts)}",
    )
    budget = memory.pins.budget_blocks
    _require(len(counts) <= budget, f"{len(counts)} blocks pinned, the budget is {budget}")
    _require(set(memory.pins.tables) <= set(memory.tables), "a pin has no open table")
    in_flight = Counter(digest for table in memory.tables.values() for digest in table.in_flight_digests)
    _require(in_flight == Counter(memory.in_flight), "the digests in flight are not those of the tables")


def _check_slots(memory: KVMemory) -> None:
    """Check that each state slot is blank, or belongs to exactly one table (running or reserved) or named block."""
    slots, slot_of = memory.slots, memory.slots.cached()
    running_slots = [table.state_slot for table in memory.tables.values() if table.state_slot is not None]
    reserved = [table.reserved_slot for table in memory.tables.values() if table.reserved_slot is not None]
    slot_counts = Counter([*slots.blank_slots, *running_slots, *reserved, *slot_of.values()])
    expected = Counter(range(1, slots.num_slots + 1))
    message = f"state slots: {slot_counts - expected} too many, {expected - slot_counts} missing"
    _require(slot_counts == expected, message, "state_slots_miscounted")
    num_reserved, num_fixed = slots.num_reserved, slots.num_reserved + len(slots.pinned_slots)
    _require(num_reserved == len(reserved), f"state slots: {num_reserved} reserved, {len(reserved)} counted")
    max_fixed = memory.config.num_slots - memory.config.num_running_slots
    _require(num_fixed <= max_fixed, f"state slots: {num_fixed} are reserved or pinned, {max_fixed} may be")
    for block, slot in slot_of.items():
        _require(bool(memory.pool.named[block]), f"state slot {slot} belongs to unnamed block {block}")
        is_pinned = memory.pins.pin_count[block] > 0
        _require(is_pinned or block not in slots.pinned_slots, f"state slot {slot} is pinned without a pin")
        _require(block not in slots.pinned_slots or block not in slots.transients, f"pinned block {block} is transient")
    _require(slots.transients <= slot_of.keys(), "state slots: one is transient that is not cached")
    for table in memory.tables.values():
        name, is_pin = f"table {table.table_id}", table.table_id in memory.pins.tables
        has_slot = table.state_slot is not None
        _require(not (is_pin and has_slot), f"{name}: a pin has a running slot")
        if memory.states is not None and not is_pin:
            _require(has_slot or not table.num_reserved, f"{name}: computed {table.num_computed} tokens, has no state")
            _require(table.is_in_flight or table.reserved_slot is None, f"{name}: a state is reserved at rest")
            is_on_border = table.num_reserved % memory.config.block_size == 0
            _require(table.reserved_slot is None or is_on_border, f"{name}: a state is reserved off a block border")
