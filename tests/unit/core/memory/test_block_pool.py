"""Blocks, reference counts and the free queue."""

import pytest

from quire.core.memory.block_pool import NULL_BLOCK, BlockPool
from quire.errors import ConfigError, InvariantError, OutOfBlocksError
from tests.support.errors import raises_code


def named_and_released(pool: BlockPool, count: int) -> list[int]:
    """A chain of blocks, named, then released as a table would: last block first."""
    blocks = pool.allocate(count).blocks
    pool.name(blocks)
    pool.release(reversed(blocks))
    return blocks


def test_a_pool_without_blocks_is_refused() -> None:
    with raises_code(ConfigError, "invalid_config"):
        BlockPool(0)


def test_the_null_block_is_never_handed_out() -> None:
    pool = BlockPool(3)
    assert NULL_BLOCK not in pool.allocate(3).blocks


def test_blank_blocks_are_taken_before_cached_ones() -> None:
    pool = BlockPool(4)
    cached = named_and_released(pool, 2)
    assert pool.allocate(2).evicted == []
    assert pool.allocate(2).evicted == list(reversed(cached))


def test_the_least_recently_released_cached_block_is_taken_first() -> None:
    pool = BlockPool(4)
    first, second = named_and_released(pool, 2), named_and_released(pool, 2)
    assert list(pool.free_queue()) == [*reversed(first), *reversed(second)]


def test_a_hit_takes_a_block_out_of_the_middle_of_the_queue() -> None:
    pool = BlockPool(3)
    blocks = named_and_released(pool, 3)
    pool.retain(blocks[1])
    assert list(pool.free_queue()) == [blocks[2], blocks[0]]
    pool.check_links()


def test_a_block_goes_back_to_the_queue_with_its_last_reference() -> None:
    pool = BlockPool(1)
    block = pool.allocate(1).blocks[0]
    pool.retain(block)
    pool.release([block])
    assert pool.num_free == 0
    pool.release([block])
    assert pool.num_free == 1


def test_the_three_states_always_add_up() -> None:
    pool = BlockPool(5)
    named_and_released(pool, 2)
    pool.allocate(1)
    assert (pool.num_blank, pool.num_cached, pool.num_referenced) == (2, 2, 1)


def test_asking_for_more_than_is_free_changes_nothing() -> None:
    pool = BlockPool(2)
    with pytest.raises(OutOfBlocksError) as error:
        pool.allocate(3)
    assert (error.value.num_needed, error.value.num_free) == (3, 2)
    assert pool.allocate(2).blocks


def test_releasing_what_nobody_holds_raises() -> None:
    pool = BlockPool(2)
    block = pool.allocate(1).blocks[0]
    pool.release([block])
    with raises_code(InvariantError, "block_not_held"):
        pool.release([block])


@pytest.mark.parametrize("stranger", [-2, -1, 0, 3, 99])
def test_a_block_that_is_not_the_pools_own_is_refused_everywhere(stranger: int) -> None:
    pool = BlockPool(2)
    pool.allocate(2)
    with pytest.raises(InvariantError):
        pool.release([stranger])
    with pytest.raises(InvariantError):
        pool.retain(stranger)
    with pytest.raises(InvariantError):
        pool.name([stranger])


def test_a_blank_block_cannot_be_retained() -> None:
    pool = BlockPool(1)
    with raises_code(InvariantError, "block_is_blank"):
        pool.retain(1)


def test_only_a_referenced_block_can_be_named_and_only_once() -> None:
    pool = BlockPool(1)
    with raises_code(InvariantError, "cannot_name_block"):
        pool.name([1])
    pool.allocate(1)
    pool.name([1])
    with raises_code(InvariantError, "cannot_name_block"):
        pool.name([1])


def test_only_a_named_block_out_of_the_queue_can_be_unnamed() -> None:
    pool = BlockPool(2)
    block = named_and_released(pool, 1)[0]
    with raises_code(InvariantError, "invariant_broken"):
        pool.unname([block])
    with raises_code(InvariantError, "invariant_broken"):
        pool.unname(pool.allocate(1).blocks)


def test_eviction_on_demand_takes_cached_blocks_and_leaves_blank_ones() -> None:
    pool = BlockPool(4)
    cached = named_and_released(pool, 2)
    assert pool.take_cached(1) == [cached[1]]
    assert pool.take_cached(9) == [cached[0]]
    assert pool.num_blank == 2


def test_unnaming_all_turns_cached_blocks_blank_without_visiting_them() -> None:
    pool = BlockPool(3)
    named_and_released(pool, 2)
    pool.unname_all()
    assert (pool.num_blank, pool.num_cached, pool.num_named) == (3, 0, 0)
    pool.check_links()
    assert pool.allocate(3).evicted == []


def test_a_broken_link_is_noticed() -> None:
    pool = BlockPool(3)
    pool.prev_free[2] = 3
    with raises_code(InvariantError, "invariant_broken"):
        pool.check_links()


def test_a_queue_that_does_not_close_is_noticed() -> None:
    pool = BlockPool(3)
    pool.num_blank = 2
    with raises_code(InvariantError, "free_queue_open"):
        pool.check_links()


def test_a_referenced_block_in_the_queue_is_noticed_when_it_would_be_taken() -> None:
    pool = BlockPool(2)
    pool.ref_count[1] = 1
    with raises_code(InvariantError, "invariant_broken"):
        pool.allocate(1)
