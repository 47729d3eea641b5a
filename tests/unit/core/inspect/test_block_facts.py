"""What is told of one block: whoever holds it, what stands before it, and nothing of what it says."""

from types import SimpleNamespace
from typing import Any

from quire.core.digests import BlockHasher, Namespace
from quire.core.inspect.block_facts import facts_of_block
from quire.core.memory.kv_config import KVMemoryConfig
from quire.core.memory.kv_memory import KVMemory

SPACE = Namespace(1, "model", "", "slots", 2, "group")
TOKENS = (1, 0, 1, 1, 0)


def memory_of(num_blocks: int = 8) -> KVMemory:
    return KVMemory(KVMemoryConfig(num_blocks, 2, pin_share=0.5), BlockHasher(bytes(32)))


def holder(table: Any, name: str = "r1") -> Any:
    return SimpleNamespace(table=table, request=SimpleNamespace(tenant="someone", request_id=name))


def facts(memory: KVMemory, block: int, *running: Any, now_s: float = 5.0) -> Any:
    return facts_of_block(memory, running, block, now_s)


def test_a_number_that_no_block_has_is_no_block() -> None:
    memory = memory_of(8)
    assert [facts(memory, number) for number in (-1, 0, 9)] == [None] * 3
    assert facts(memory, 8).state == "free"


def test_a_free_block_stands_behind_nothing_and_belongs_to_nobody() -> None:
    told = facts(memory_of(), 3, holder(None))
    assert (told.state, told.ref_count, told.num_tokens) == ("free", 0, 0)
    assert (told.digest, told.cache_group, told.tenant, told.age_s) == (None, None, None, None)
    assert (told.chain, told.children, told.requests) == ((), (), ())


def test_blocks_of_a_sequence_are_computed_then_held_and_the_last_is_filled_in_part() -> None:
    memory = memory_of()
    memory.advance(2.0)
    table = memory.open(SPACE)
    memory.reserve(table, TOKENS, len(TOKENS))
    first, second, last = table.blocks
    assert {facts(memory, block, holder(table)).state for block in table.blocks} == {"computing"}
    memory.commit(table, len(TOKENS))
    told = facts(memory, last, holder(table), holder(table, "r2"), holder(table))
    assert (told.state, told.num_tokens, told.digest, told.cache_group) == ("used", 1, None, "group")
    assert told.chain == (first, second, last)
    assert (told.tenant, told.requests) == ("someone", ("r1", "r2"))
    named = facts(memory, second, holder(table))
    assert (named.num_tokens, named.chain, named.age_s) == (2, (first, second), 3.0)
    assert facts(memory, first, holder(table)).children == (second,)


def test_what_is_cached_keeps_its_chain_and_what_is_pinned_says_so() -> None:
    memory = memory_of()
    table = memory.open(SPACE)
    memory.reserve(table, TOKENS, len(TOKENS))
    memory.commit(table, len(TOKENS))
    first, second, _ = table.blocks
    memory.release(table)
    assert facts(memory, second).state == "cached"
    memory.pin(SPACE, TOKENS[:2], 60.0)
    pinned = facts(memory, first)
    assert (pinned.state, pinned.pin_count, pinned.num_tokens, pinned.cache_group) == ("pinned", 1, 2, "group")
    assert facts(memory, second).chain == (first, second)
