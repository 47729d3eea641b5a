"""What a router is told that comes late. `ShadowedMemory.verify_all` asks the same after any order of operations."""

import pytest

from quire.core.digests import BlockHasher, Namespace
from quire.core.events import BlockStored
from quire.core.memory.kv_config import KVMemoryConfig
from quire.core.memory.kv_memory import KVMemory
from quire.core.memory.kv_publisher import MAX_RUN_BLOCKS
from tests.support.core.shadow import KEY, Listener, namespace

SPACE = namespace(2)


class Watched:
    """A memory of blocks of two tokens, and a router that has heard everything."""

    def __init__(self, num_blocks: int = 200) -> None:
        self.listener = Listener()
        self.memory = KVMemory(KVMemoryConfig(num_blocks, 2), BlockHasher(KEY), self.listener)

    def compute(self, tokens: list[int], space: Namespace = SPACE) -> None:
        table = self.memory.open(space)
        self.memory.match(table, tokens)
        self.memory.reserve(table, tokens, len(tokens) - table.num_computed)
        self.memory.commit(table, len(tokens) - table.num_computed)
        self.memory.release(table)


def believed(events: list[BlockStored]) -> Listener:
    late = Listener()
    for event in events:
        late(event)
    return late


def test_an_empty_memory_has_nothing_to_tell() -> None:
    assert list(Watched().memory.stored_events()) == []


def test_a_chain_is_told_as_one_run() -> None:
    watched = Watched()
    watched.compute([1, 2, 3, 4, 5, 6])
    (event,) = watched.memory.stored_events()
    assert (event.token_ids, event.parent_digest, event.block_size) == ((1, 2, 3, 4, 5, 6), None, 2)
    assert (event.adapter, event.cache_group) == (SPACE.adapter, SPACE.cache_group)


def test_branches_come_after_what_they_have_in_common() -> None:
    watched = Watched()
    for tail in (5, 6, 7):
        watched.compute([1, 2, 3, 4, tail, tail, 9, 9])
    events = list(watched.memory.stored_events())
    assert [event.token_ids[0] for event in events] == [1, 7, 6, 5]
    assert {event.parent_digest for event in events[1:]} == {events[0].digests[-1]}
    assert believed(events).prefixes == watched.listener.prefixes


def test_long_chains_are_told_in_runs_of_bounded_length() -> None:
    watched = Watched()
    watched.compute([*range(2 * (2 * MAX_RUN_BLOCKS + 3))])
    events = list(watched.memory.stored_events())
    assert [len(event.digests) for event in events] == [MAX_RUN_BLOCKS, MAX_RUN_BLOCKS, 3]
    assert believed(events).prefixes == watched.listener.prefixes


def test_every_tenant_is_told_with_its_group() -> None:
    watched = Watched()
    for group in ("a", "b"):
        watched.compute([1, 2], namespace(2, group))
    assert {event.cache_group for event in watched.memory.stored_events()} == {"a", "b"}


@pytest.mark.parametrize("clears", [False, True])
def test_it_is_the_truth_of_the_moment_it_was_asked_for(clears: bool) -> None:
    watched = Watched(8)
    for tail in (3, 4, 5):
        watched.compute([1, 2, tail, tail])
    then = dict(watched.listener.prefixes)
    events = watched.memory.stored_events()
    if clears:
        watched.memory.clear()
    for start in range(10, 90, 8):
        watched.compute([*range(start, start + 8)])
    assert believed(list(events)).prefixes == then
    assert believed(list(watched.memory.stored_events())).prefixes == watched.listener.prefixes


def test_nothing_is_told_where_nobody_listens() -> None:
    memory = KVMemory(KVMemoryConfig(8, 2), BlockHasher(KEY))
    table = memory.open(SPACE)
    memory.reserve(table, [1, 2], 2)
    memory.commit(table, 2)
    assert list(memory.stored_events()) == []
