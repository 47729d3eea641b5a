"""KV events of a model with recurrent layers: what can be hit is told, once, and taken back when it is gone."""

from quire.core.digests import BlockHasher
from quire.core.events import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent
from quire.core.memory.kv_memory import KVMemory
from quire.core.memory.state_slots import StateCheckpoint
from tests.support.core.kept_states import SPACE, config
from tests.support.core.shadow import KEY


class Heard:
    """A memory, and all that it has said."""

    def __init__(self, num_blocks: int = 16, num_kept: int = 6) -> None:
        self.events: list[KVEvent] = []
        self.memory = KVMemory(config(num_blocks, num_kept), BlockHasher(KEY), self.events.append)

    def compute(
        self, tokens: list[int], borders: list[int], keep: StateCheckpoint = StateCheckpoint.DURABLE
    ) -> list[KVEvent]:
        """A sequence keeps its state at these borders and ends; returns what was said meanwhile."""
        table, first = self.memory.open(SPACE), len(self.events)
        self.memory.match(table, tokens)
        for end in (*borders, len(tokens)):
            if end > table.num_computed:
                self.memory.reserve(table, tokens, end - table.num_computed, keep=keep if end in borders else None)
                self.memory.commit(table, end - table.num_computed)
        self.memory.release(table)
        return self.events[first:]


def stored(events: list[KVEvent]) -> list[tuple[int, ...]]:
    """The tokens of all blocks that were told, event by event."""
    assert all(isinstance(event, BlockStored) for event in events)
    return [event.token_ids for event in events if isinstance(event, BlockStored)]


def digests(events: list[KVEvent]) -> list[bytes]:
    return [digest for event in events if isinstance(event, BlockStored) for digest in event.digests]


def test_blocks_without_a_state_behind_them_are_not_told() -> None:
    assert Heard().compute(list(range(14)), []) == []


def test_blocks_are_told_up_to_the_state_and_no_further() -> None:
    (event,) = Heard().compute(list(range(14)), [8])
    assert isinstance(event, BlockStored)
    assert (event.token_ids, event.parent_digest, len(event.digests)) == (tuple(range(8)), None, 2)
    assert (event.block_size, event.adapter, event.cache_group) == (4, SPACE.adapter, SPACE.cache_group)


def test_a_second_state_tells_what_lies_between_under_its_parent() -> None:
    first, second = Heard().compute(list(range(18)), [4, 12])
    assert isinstance(first, BlockStored)
    assert isinstance(second, BlockStored)
    assert second.token_ids == tuple(range(4, 12))
    assert second.parent_digest == first.digests[-1]


def test_nothing_is_told_twice() -> None:
    heard = Heard()
    heard.compute(list(range(14)), [8])
    assert heard.compute(list(range(14)), [8]) == [], "a hit"
    assert heard.compute([*range(8), 50, 51], [8]) == []
    heard.memory.slots.forget(list(heard.memory.slots.cached()))
    assert heard.compute(list(range(14)), [4, 8]) == [], "the states are new, the blocks were told"


def test_blocks_that_another_sequence_had_left_untold_are_told_with_a_state() -> None:
    heard = Heard()
    assert heard.compute(list(range(14)), []) == []
    assert stored(heard.compute(list(range(14)), [12])) == [tuple(range(12))]


def test_a_state_that_has_left_is_not_told_while_its_block_is_there() -> None:
    heard = Heard(num_kept=1)
    heard.compute(list(range(5)), [4])
    open_tables = [heard.memory.open(SPACE) for _ in range(3)]
    for at, table in enumerate(open_tables):
        heard.memory.reserve(table, [40 + at], 1)
    heard.compute([30] * 5, [4])
    assert heard.memory.slots.num_evictions > 0
    assert stored(heard.events) == [(0, 1, 2, 3), (30, 30, 30, 30)]


def test_only_what_was_told_is_taken_back() -> None:
    heard = Heard()
    told = heard.compute(list(range(16)), [8])
    heard.memory.evict(1)
    assert heard.events == told, "nobody has heard of the last block"
    heard.memory.evict(3)
    assert heard.events[-1] == BlockRemoved(tuple(reversed(digests(told))))
    assert len(heard.events) == 2


def test_what_was_taken_back_is_told_again_when_it_can_be_hit_again() -> None:
    heard = Heard()
    first = heard.compute(list(range(8)), [8])
    heard.memory.evict(9)
    assert heard.compute(list(range(8)), []) == [], "in the very same physical blocks"
    heard.memory.evict(9)
    assert heard.events[len(first) :] == [BlockRemoved(tuple(reversed(digests(first))))]
    assert heard.compute(list(range(8)), [8]) == first


def test_after_a_clear_everything_is_untold() -> None:
    heard = Heard()
    first = heard.compute(list(range(8)), [8])
    heard.memory.clear()
    assert heard.events[-1] == AllBlocksCleared()
    assert heard.compute(list(range(8)), [8]) == first


def test_a_failed_row_tells_nothing() -> None:
    heard = Heard()
    table = heard.memory.open(SPACE)
    heard.memory.reserve(table, [1] * 5, 4, keep=StateCheckpoint.DURABLE)
    heard.memory.commit(table, 0)
    assert heard.events == []
