"""Pins: a budget, a time limit, and nothing special anywhere else."""

from random import Random

import pytest

from quire.core.digests import BlockHasher
from quire.core.inspect import invariants
from quire.core.memory.kv_config import KVMemoryConfig
from quire.core.memory.kv_memory import KVMemory
from quire.core.memory.pins import UNPIN_BLOCKS_AT_ONCE
from tests.support.core.shadow import KEY, namespace

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
    assert memory.pin(SPACE, [2] * 16, expires_s=10.0).num_tokens == 8, "the part that fits"
    invariants.check(memory)
    assert memory.stats().num_pinned_blocks == 4
    assert memory.pin(SPACE, [2] * 4, expires_s=10.0).num_tokens == 4, "pinned blocks need no more room"


def test_a_block_pinned_twice_counts_once_and_stays_until_the_last_pin_goes() -> None:
    memory = new_memory(num_blocks=16, pin_share=0.25)
    cache(memory, [1] * 16)
    first = memory.pin(SPACE, [1] * 8, expires_s=10.0, tenant="a")
    second = memory.pin(SPACE, [1] * 8, expires_s=10.0, tenant="b")
    assert memory.stats().num_pinned_blocks == 2
    memory.unpin(first)
    assert memory.stats().num_pinned_blocks == 2
    memory.unpin(second)
    assert memory.stats().num_pinned_blocks == 0


def test_the_number_of_pins_is_bounded_however_few_blocks_they_hold() -> None:
    memory = new_memory(max_pins=2)
    cache(memory, [1] * 4)
    for tenant, num_tokens in (("a", 4), ("b", 4), ("c", 0)):
        assert memory.pin(SPACE, [1] * 4, expires_s=10.0, tenant=tenant).num_tokens == num_tokens


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


def test_a_longer_pin_replaces_the_tenants_prefixes_that_end_no_later() -> None:
    memory = new_memory()
    cache(memory, [1] * 16)
    memory.pin(SPACE, [1] * 4, expires_s=5.0)
    late = memory.pin(SPACE, [1] * 8, expires_s=50.0)
    memory.pin(SPACE, [1] * 16, expires_s=10.0)
    assert len(memory.pins.tables) == 2
    assert memory.pin(SPACE, [1] * 8, expires_s=20.0) == late, "it lasts longer already"
    memory.advance(10.0)
    assert memory.stats().num_pinned_blocks == 2
    invariants.check_at_rest(memory)


def test_the_budget_is_divided_by_weight_among_the_tenants_that_pin() -> None:
    memory = new_memory(num_blocks=64)
    memory.pins.weights = {"b": 3.0}
    cache(memory, [1] * 64)
    cache(memory, [2] * 64)
    assert memory.pin(SPACE, [1] * 64, 10.0, "a").num_tokens == 64, "alone it may hold the whole budget"
    assert memory.pin(SPACE, [2] * 64, 10.0, "b").num_tokens == 48
    assert memory.stats().num_pins_yielded == 1
    assert memory.pin(SPACE, [1] * 64, 10.0, "a").num_tokens == 16
    assert memory.pin(SPACE, [1] * 64, 10.0, "a").num_tokens == 16, "a tenant with its share takes no other's"
    assert memory.stats().num_pins_yielded == 1
    invariants.check_at_rest(memory)


def test_a_computed_table_is_pinned_without_a_lookup_up_to_its_last_whole_block() -> None:
    memory = new_memory()
    table = memory.open(SPACE)
    memory.reserve(table, [1] * 10, 10)
    memory.commit(table, 10)
    assert memory.pin_table(table, 7, 10.0, "").num_tokens == 4
    assert memory.pin_table(table, 10, 10.0, "").num_tokens == 8
    memory.release(table)
    memory.evict(99)
    assert memory.divergence(SPACE, [1] * 10).num_cached_tokens == 8
    invariants.check_at_rest(memory)


def test_blocks_that_lost_their_names_are_not_pinned() -> None:
    memory = new_memory()
    table = memory.open(SPACE)
    memory.reserve(table, [1] * 10, 10)
    memory.commit(table, 10)
    memory.clear()
    assert memory.pin_table(table, 10, 10.0, "").num_tokens == 0
    memory.release(table)
    invariants.check_at_rest(memory)


def test_the_pin_nearest_its_end_yields_first() -> None:
    memory = new_memory()
    cache(memory, [1] * 8)
    cache(memory, [2] * 8)
    memory.pin(SPACE, [1] * 8, expires_s=20.0)
    memory.pin(SPACE, [2] * 8, expires_s=10.0)
    for num_left in (2, 0):
        assert memory.yield_pin()
        assert memory.stats().num_pinned_blocks == num_left
        assert memory.divergence(SPACE, [2] * 8).num_cached_tokens == 4, "it stays cached"
    assert not memory.yield_pin()
    assert memory.stats().num_pins_yielded == 2
    invariants.check_at_rest(memory)


def num_held(memory: KVMemory, tenant: str) -> int:
    return len(memory.pins.num_of_tenant.get(tenant, ()))


@pytest.mark.parametrize("seed", range(20))
def test_whatever_is_flooded_live_pins_lose_no_block_and_hold_no_more_than_their_budget(seed: int) -> None:
    random, now_s = Random(seed), 0.0
    memory = new_memory(num_blocks=random.randint(16, 64))
    memory.pins.weights = {"b": 2.0}
    live = list[tuple[list[int], int, float]]()
    for number in range(300):
        now_s += random.random()
        memory.advance(now_s)
        cache(memory, [1000 + number] * random.randint(1, 32))
        memory.evict(random.choice((0, 0, 99)))
        tenant = random.choice("ab")
        prompt = [random.randrange(4)] * 4 + [random.randrange(6)] * random.randint(0, 20)
        cache(memory, prompt)
        num_yielded, num_before = memory.stats().num_pins_yielded, num_held(memory, tenant)
        pin = memory.pin(SPACE, prompt, now_s + 20 * random.random(), tenant)
        if memory.stats().num_pins_yielded > num_yielded:
            live.clear()  # a pin of a tenant above its share yielded
        assert pin.num_tokens <= len(prompt)
        live = [one for one in live if one[2] > now_s] + [(prompt, pin.num_tokens, pin.expires_s)]
        for tokens, num_tokens, _ in live:
            assert memory.divergence(SPACE, [*tokens[:num_tokens], 0]).num_cached_tokens >= num_tokens
        assert memory.stats().num_pinned_blocks <= memory.pins.budget_blocks
        assert num_held(memory, tenant) <= max(num_before, memory.pins.shares(tenant)[tenant])
        invariants.check_at_rest(memory)
    memory.advance(now_s + 1e6)
    assert memory.stats().num_pinned_blocks == 0, "expired ones are not kept"
