"""The memory under any order of operations. The same machines run longer in `make proof-memory`."""

from random import Random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from quire.core.digests import BlockHasher
from quire.core.memory.kv_config import KVMemoryConfig
from quire.core.memory.kv_memory import KVMemory
from tests.support.core.random_driver import RandomDriver
from tests.support.core.reference_lru import ReferenceCache
from tests.support.core.shadow import KEY, WeakHasher, namespace
from tests.support.core.state_comparison import StateComparison
from tests.support.machine.machine import HybridMemoryMachine, KVMemoryMachine


@pytest.mark.parametrize("machine", [KVMemoryMachine, HybridMemoryMachine])
def test_every_promise_holds_after_any_order_of_operations(machine: type[KVMemoryMachine]) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=40, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )


@pytest.mark.parametrize("num_blocks", [1, 2, 3, 5, 8, 21, 64, 300])
@pytest.mark.parametrize("block_size", [1, 2, 4, 16])
@pytest.mark.parametrize("has_state", [False, True])
def test_random_operations_never_break_a_promise(num_blocks: int, block_size: int, has_state: bool) -> None:
    seed = num_blocks * 100 + block_size
    driver = RandomDriver(seed, num_blocks, block_size, check_every=100, has_state=has_state)
    driver.run(1500)
    driver.rest()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("has_state", [False, True])
def test_a_digest_of_eight_bits_never_serves_the_wrong_block(seed: int, has_state: bool) -> None:
    driver = RandomDriver(seed, 200, 2, hasher=WeakHasher(KEY), check_every=200, has_state=has_state)
    driver.vocabulary = 50
    driver.run(3000)
    driver.rest()
    assert driver.shadow.memory.stats().num_collisions > 0


@pytest.mark.parametrize("seed", range(3))
def test_hits_equal_those_of_a_dictionary_with_exact_leaf_lru(seed: int) -> None:
    random, block_size, num_blocks = Random(seed), 2, 40
    reference = ReferenceCache(num_blocks, block_size)
    memory = KVMemory(KVMemoryConfig(num_blocks, block_size), BlockHasher(KEY))
    for _ in range(3000):
        tokens = tuple(random.choice((0, 0, 0, 1)) for _ in range(random.randint(1, 24)))
        table = memory.open(namespace(block_size))
        assert memory.match(table, tokens) == reference.lookup(tokens)
        rest = len(tokens) - table.num_computed
        memory.reserve(table, tokens, rest)
        reference.run(tokens)
        memory.commit(table, rest)
        memory.release(table)
        reference.release(tokens)
    assert memory.stats().num_evictions > 1000


@pytest.mark.parametrize("seed", range(5))
def test_hits_with_states_equal_those_of_token_tuples_with_exact_queues(seed: int) -> None:
    comparison = StateComparison(seed)
    comparison.run(1000)
    assert comparison.num_mismatches == 0
    assert comparison.reference.num_block_evictions > 300
    assert comparison.reference.num_state_evictions > 300
    assert comparison.num_hits > 100
    assert comparison.num_states_missed > 100
