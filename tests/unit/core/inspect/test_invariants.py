"""The checker itself: each promise is broken by hand, and the check must say so."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from quire.core.digests import BlockHasher
from quire.core.inspect import invariants
from quire.core.memory.kv_config import KVMemoryConfig
from quire.core.memory.kv_memory import KVMemory
from quire.core.memory.state_slots import StateCheckpoint
from quire.errors import InvariantError
from tests.support.core.shadow import KEY, namespace
from tests.support.errors import raises_code

SPACE = namespace(block_size=2)


def lively_memory() -> KVMemory:
    """One sequence of blocks 1 to 3, in flight in block 4; a cached chain 5, 6; a pin on 5; the rest blank."""
    memory = KVMemory(KVMemoryConfig(12, 2, pin_share=0.25), BlockHasher(KEY))
    running = memory.open(SPACE)
    memory.reserve(running, list(range(6)), 6)
    memory.commit(running, 6)
    memory.reserve(running, list(range(7)), 1)
    cached = memory.open(SPACE)
    memory.reserve(cached, [9] * 4, 4)
    memory.commit(cached, 4)
    memory.release(cached)
    memory.pin(SPACE, [9, 9], 100.0)
    invariants.check(memory)
    return memory


def running(memory: KVMemory) -> list[int]:
    return memory.tables[1].blocks


def poke(memory: KVMemory, **changes: int) -> None:
    for name, value in changes.items():
        setattr(memory.pool, name, value)


def also_held_by_the_pin(memory: KVMemory) -> None:
    memory.pool.retain(4)
    memory.tables[3].blocks.append(4)


def copying_at_rest(memory: KVMemory) -> None:
    memory.pool.retain(1)
    memory.tables[3].copy_source = 1


BREAKS: dict[str, Callable[[KVMemory], object]] = {
    "5 referenced, 4 used": lambda m: running(m).pop(),
    "block 1: 3 references, 1 table entries": lambda m: m.pool.ref_count.__setitem__(1, 3),
    "cached blocks counted": lambda m: poke(m, num_cached=0, num_blank=m.pool.num_free),
    "the null block is referenced": lambda m: m.pool.ref_count.__setitem__(0, 1),
    "tree and pool disagree": lambda m: m.pool.named.__setitem__(1, 0),
    "its digest leads to": lambda m: m.tree.shards[0].__setitem__(m.tree.digest_of(1), 2),
    "digest is not that of its tokens": lambda m: m.tree.records.__setitem__(1 * 40 + 32, 77),
    "block 6 is under 3": lambda m: m.tree.first_children.__setitem__(3, 6),
    "its parent 4 is not named": lambda m: m.tree.parents.__setitem__(6, 4),
    "named blocks counted": lambda m: poke(m, num_named=1),
    "names lead to": lambda m: m.tree.shards[0].__setitem__(bytes(32), 1),
    "blocks are in the tree": lambda m: m.tree.first_children.__setitem__(5, 0),
    "tables counted": lambda m: setattr(m.tree.root_nodes[0], "num_tables", 9),
    "is unused": lambda m: setattr(m.tree.root_nodes[m.tree.open_root(namespace(2, "x")) ^ -1], "num_tables", 0),
    "computed beyond": lambda m: setattr(m.tables[1], "num_computed", 8),
    "blocks for 99 tokens": lambda m: setattr(m.tables[1], "num_reserved", 99),
    "copy source at rest": copying_at_rest,
    "not in flight in the memory": lambda m: m.tables[1].in_flight_digests.append(bytes(32)),
    "not those of the tables": lambda m: m.in_flight.__setitem__(bytes(32), 1),
    "pins counted": lambda m: m.pins.pin_count.__setitem__(5, 4),
    "pinned blocks counted": lambda m: setattr(m.pins, "num_pinned_blocks", 3),
    "the budget is 0": lambda m: setattr(m.pins, "budget_blocks", 0),
    "is being written and shared": also_held_by_the_pin,
    "free queue": lambda m: m.pool.next_free.__setitem__(0, 9),
}


@pytest.mark.parametrize("complaint", BREAKS)
def test_a_broken_promise_is_noticed(complaint: str) -> None:
    memory = lively_memory()
    BREAKS[complaint](memory)
    with pytest.raises(InvariantError, match=complaint):
        invariants.check(memory)


def memory_with_states() -> KVMemory:
    """Table 1 is in flight in slot 1, slot 2 is reserved; block 2 carries a state in passing, block 3 a pinned one."""
    config = KVMemoryConfig(12, 2, pin_share=0.5, num_slots=8, num_running_slots=3)
    memory = KVMemory(config, BlockHasher(KEY))
    running = memory.open(SPACE)
    memory.reserve(running, [1, 1], 2, keep=StateCheckpoint.DURABLE)
    for token, keep in ((8, StateCheckpoint.TRANSIENT), (9, StateCheckpoint.DURABLE)):
        cached = memory.open(SPACE)
        memory.reserve(cached, [token] * 2, 2, keep=keep)
        memory.commit(cached, 2)
        memory.release(cached)
    memory.pin(SPACE, [9, 9], 100.0)
    invariants.check(memory)
    return memory


def carried_by_a_block_without_a_name(memory: KVMemory) -> None:
    memory.slots.cached_slots[7] = memory.slots.blank_slots.pop()


def kept_for_a_pin_that_is_gone(memory: KVMemory) -> None:
    memory.slots.pinned_slots[2] = memory.slots.cached_slots.pop(2)


def reserved_at_rest(memory: KVMemory) -> None:
    memory.tables[4].reserved_slot, memory.tables[1].reserved_slot = memory.tables[1].reserved_slot, None
    memory.pins.tables.pop(4)
    memory.pins.pin_count[3] = memory.pins.num_pinned_blocks = 0
    memory.slots.unpin_states([3])
    memory.tables[4].state_slot = memory.slots.blank_slots.pop()


def running_without_a_slot(memory: KVMemory) -> None:
    slot = memory.tables[1].state_slot
    assert slot is not None
    memory.slots.blank_slots.append(slot)
    memory.tables[1].state_slot = None


def a_pin_that_runs(memory: KVMemory) -> None:
    memory.tables[4].state_slot = memory.slots.blank_slots.pop()


STATE_BREAKS: dict[str, Callable[[KVMemory], object]] = {
    r"Counter\(\{3: 1\}\) missing": lambda m: m.slots.blank_slots.pop(),
    r"Counter\(\{2: 1\}\) too many": lambda m: m.slots.blank_slots.append(2),
    "2 reserved, 1 counted": lambda m: setattr(m.slots, "num_reserved", 2),
    "2 are reserved or pinned, 1 may be": lambda m: setattr(m, "config", replace(m.config, num_running_slots=7)),
    "belongs to unnamed block 7": carried_by_a_block_without_a_name,
    "is pinned without a pin": kept_for_a_pin_that_is_gone,
    "pinned block 3 is transient": lambda m: m.slots.transients.add(3),
    "one is transient that is not cached": lambda m: m.slots.transients.add(7),
    "a pin has a running slot": a_pin_that_runs,
    "computed 0 tokens, has no state": running_without_a_slot,
    "a state is reserved at rest": reserved_at_rest,
    "a state is reserved off a block border": lambda m: setattr(m.tables[1], "num_reserved", 1),
}


@pytest.mark.parametrize("complaint", STATE_BREAKS)
def test_a_broken_promise_about_states_is_noticed(complaint: str) -> None:
    memory = memory_with_states()
    STATE_BREAKS[complaint](memory)
    with pytest.raises(InvariantError, match=complaint):
        invariants.check(memory)


def test_cached_states_may_remain_at_rest_and_running_ones_may_not() -> None:
    memory = memory_with_states()
    with raises_code(InvariantError, "tables_still_open"):
        invariants.check_at_rest(memory)
    memory.commit(memory.tables[1], 2)
    memory.release(memory.tables[1])
    invariants.check_at_rest(memory)
    assert memory.slots.num_cached == 3


def test_an_open_table_is_not_at_rest() -> None:
    memory = lively_memory()
    with raises_code(InvariantError, "tables_still_open"):
        invariants.check_at_rest(memory)
    memory.commit(memory.tables[1], 1)
    memory.release(memory.tables[1])
    invariants.check_at_rest(memory)
