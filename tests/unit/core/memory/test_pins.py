"""Pins: a budget, a time limit, and nothing special anywhere else."""

from quire.core.digests import BlockHasher
from quire.core.inspect import invariants
from quire.core.memory.kv_config import KVMemoryConfig
from quire.core.memory.kv_memory import KVMemory
from quire.core.memory.pins import UNPIN_BLOCKS_AT_ONCE
from quire.errors import PinBudgetError
from tests.support.core.shadow import KEY, namespace
from tests.support.errors import raises_code

SPACE = namespace(block_size=4)


def new_memory(num_blocks: int = 16, **settings: float) -> KVMemory:
    settings = {"pin_share": 0.25, **settings}
    return KVMemory(KVMemoryConfig(num_blocks, 4, **settings), BlockHasher(KEY))  # type: ignore[arg-type]


def cache(memory: KVMemory, tokens: list[int]) -> None:
    table = memory.open(SPACE)
    memory.match(table, tokens)
    rest = len(tokens) - table.num_computed
    memory.reserve(table, tokens, rest)
    memory.commit(table, rest)
    memory.release(table)


def test_a_pinned_prefix_survives_what_evicts_all_others() -> None:
    memory = new_memory()
    cache(memory, [1] * 8)
    cache(memory, [2] * 8)
    assert memory.pin(SPACE, [1] * 8, expires_s=100.0).num_tokens == 8
    memory.evict(99)
    assert memory.divergence(SPACE, [1] * 9).num_cached_tokens == 8
    assert memory.divergence(SPACE, [2] * 9).num_cached_tokens == 0
    invariants.check_at_rest(memory)


def test_a_pin_takes_the_last_full_block_too() -> None:
    memory = new_memory()
    cache(memory, [1] * 10)
    assert memory.pin(SPACE, [1] * 10, expires_s=1.0).num_tokens == 8


def test_a_pin_ends_at_its_time() -> None:
    memory = new_memory()
    cache(memory, [1] * 8)
    memory.pin(SPACE, [1] * 8, expires_s=10.0)
    memory.advance(9.9)
    assert memory.stats().num_pinned_blocks == 2
    memory.advance(10.0)
    assert memory.stats().num_pinned_blocks == 0
    assert memory.evict(99) == 2


def test_a_pin_never_outlives_the_longest_time_allowed() -> None:
    memory = new_memory(max_pin_s=5.0)
    cache(memory, [1] * 8)
    memory.advance(100.0)
    assert memory.pin(SPACE, [1] * 8, expires_s=1e9).expires_s == 105.0


def test_a_moment_that_is_not_a_number_is_the_longest_time_allowed() -> None:
    memory = new_memory(max_pin_s=5.0)
    cache(memory, [1] * 8)
    assert memory.pin(SPACE, [1] * 8, expires_s=float("nan")).expires_s == 5.0


def test_a_pin_can_be_let_go_early_and_twice() -> None:
    memory = new_memory()
    cache(memory, [1] * 8)
    pin = memory.pin(SPACE, [1] * 8, expires_s=10.0)
    memory.unpin(pin)
    memory.unpin(pin)
    memory.advance(11.0)
    assert memory.pool.num_referenced == 0
    invariants.check(memory)


def test_pinning_what_is_not_cached_pins_nothing() -> None:
    memory = new_memory()
    pin = memory.pin(SPACE, [1] * 8, expires_s=10.0)
    assert pin.num_tokens == 0
    memory.unpin(pin)
    invariants.check_at_rest(memory)
    assert not memory.tables


def test_pins_hold_no_more_than_their_budget() -> None:
    memory = new_memory(num_blocks=16, pin_share=0.25)
    cache(memory, [1] * 8)
    cache(memory, [2] * 16)
    memory.pin(SPACE, [1] * 8, expires_s=10.0)
    with raises_code(PinBudgetError, "pin_budget_exceeded"):
        memory.pin(SPACE, [2] * 16, expires_s=10.0)
    invariants.check(memory)
    assert memory.stats().num_pinned_blocks == 2


def test_a_block_pinned_twice_counts_once_and_stays_until_the_last_pin_goes() -> None:
    memory = new_memory(num_blocks=16, pin_share=0.25)
    cache(memory, [1] * 16)
    first = memory.pin(SPACE, [1] * 16, expires_s=10.0)
    second = memory.pin(SPACE, [1] * 16, expires_s=10.0)
    assert memory.stats().num_pinned_blocks == 4
    memory.unpin(first)
    assert memory.stats().num_pinned_blocks == 4
    memory.unpin(second)
    assert memory.stats().num_pinned_blocks == 0


def test_the_number_of_pins_is_bounded_however_few_blocks_they_hold() -> None:
    memory = new_memory(max_pins=2)
    cache(memory, [1] * 4)
    memory.pin(SPACE, [1] * 4, expires_s=10.0)
    memory.pin(SPACE, [1] * 4, expires_s=10.0)
    with raises_code(PinBudgetError, "too_many_pins"):
        memory.pin(SPACE, [1] * 4, expires_s=10.0)


def test_pins_ended_by_hand_do_not_pile_up() -> None:
    memory = new_memory()
    cache(memory, [1] * 4)
    for _ in range(1000):
        memory.unpin(memory.pin(SPACE, [1] * 4, expires_s=10.0))
    assert len(memory.pins._expiries) <= 64


def test_clearing_drops_all_pins() -> None:
    memory = new_memory()
    cache(memory, [1] * 8)
    pin = memory.pin(SPACE, [1] * 8, expires_s=10.0)
    memory.clear()
    memory.unpin(pin)
    memory.advance(20.0)
    invariants.check_at_rest(memory)
    assert memory.pool.num_blank == 16


def test_many_pins_that_end_together_are_released_a_bounded_number_at_a_time() -> None:
    length = UNPIN_BLOCKS_AT_ONCE // 2
    memory = new_memory(num_blocks=length * 5, pin_share=1.0)
    for token in range(5):
        cache(memory, [token] * 4 * length)
        memory.pin(SPACE, [token] * 4 * length, expires_s=10.0)
    left = []
    for _ in range(3):
        memory.advance(11.0)
        left.append(len(memory.pins.tables))
    assert left == [3, 1, 0]


def test_a_long_pin_is_released_from_its_tail_in_slices() -> None:
    memory = new_memory(num_blocks=3 * UNPIN_BLOCKS_AT_ONCE, pin_share=1.0)
    length = 2 * UNPIN_BLOCKS_AT_ONCE + 10
    cache(memory, [1] * 4 * length)
    memory.pin(SPACE, [1] * 4 * length, expires_s=10.0)
    left = []
    for _ in range(3):
        memory.advance(11.0)
        left.append(memory.stats().num_pinned_blocks)
        invariants.check(memory)
    assert left == [UNPIN_BLOCKS_AT_ONCE + 10, 10, 0]
    invariants.check_at_rest(memory)


def test_a_pin_dropped_by_hand_leaves_no_trace_in_what_expires() -> None:
    memory = new_memory()
    cache(memory, [1] * 4)
    cache(memory, [2] * 4)
    memory.unpin(memory.pin(SPACE, [1] * 4, expires_s=5.0))
    memory.pin(SPACE, [2] * 4, expires_s=6.0)
    memory.advance(7.0)
    assert memory.stats().num_pinned_blocks == 0
