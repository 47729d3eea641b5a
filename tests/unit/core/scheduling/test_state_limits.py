"""What is refused, pinned and told of recurrent states."""

import pytest

from quire.core.digests import BlockHasher
from quire.core.divergence import Divergence, MissReason
from quire.core.inspect import invariants
from quire.core.memory.kv_config import KVMemoryConfig
from quire.core.memory.kv_memory import KVMemory
from quire.core.memory.state_slots import StateCheckpoint
from quire.core.scheduling.scheduler import Scheduler
from quire.core.scheduling.scheduler_config import SchedulerConfig
from quire.errors import ConfigError, InvariantError
from tests.support.core.kept_states import NUM_RUNNING, SPACE, cached, computed, config, new_shadow
from tests.support.core.shadow import KEY
from tests.support.errors import raises_code


class TestMisuse:
    def test_drafts_are_refused(self) -> None:
        memory = KVMemory(config(), BlockHasher(KEY))
        table = memory.open(SPACE)
        with raises_code(InvariantError, "drafts_with_state"):
            memory.reserve(table, [1, 2], 2, [3, 4])
        assert memory.pool.num_free == 16

    @pytest.mark.parametrize("num_tokens", [1, 3, 5])
    def test_a_state_beside_a_border_is_refused(self, num_tokens: int) -> None:
        memory = KVMemory(config(), BlockHasher(KEY))
        table = memory.open(SPACE)
        with raises_code(InvariantError, "cannot_keep_state"):
            memory.reserve(table, [1] * 6, num_tokens, keep=StateCheckpoint.DURABLE)
        assert memory.pool.num_free == 16

    def test_a_state_of_a_model_without_any_is_refused(self) -> None:
        memory = KVMemory(KVMemoryConfig(8, 4), BlockHasher(KEY))
        with raises_code(InvariantError, "cannot_keep_state"):
            memory.reserve(memory.open(SPACE), [1] * 4, 4, keep=StateCheckpoint.DURABLE)

    @pytest.mark.parametrize(("num_slots", "num_running"), [(4, 0), (4, 5), (0, 1), (-1, -1), (4, -1)])
    def test_slots_that_leave_nobody_one_to_run_in_are_refused(self, num_slots: int, num_running: int) -> None:
        with raises_code(ConfigError, "invalid_config"):
            KVMemoryConfig(8, 4, num_slots=num_slots, num_running_slots=num_running)

    def test_a_state_for_which_there_is_no_slot_is_not_kept_and_nothing_else_changes(self) -> None:
        shadow = new_shadow(num_kept=0)
        sequence = computed(shadow, list(range(9)), [4, 8])
        assert (sequence.table.num_computed, shadow.memory.slots.num_cached) == (9, 0)


def test_a_scheduler_needs_slots_for_all_who_run_and_for_the_next() -> None:
    memory = KVMemory(config(), BlockHasher(KEY))
    assert Scheduler(SchedulerConfig(max_running=NUM_RUNNING - 1), memory).memory is memory
    with raises_code(ConfigError, "too_few_state_slots"):
        Scheduler(SchedulerConfig(max_running=NUM_RUNNING), memory)


class TestPins:
    def test_a_pin_holds_blocks_up_to_the_deepest_state_and_that_state(self) -> None:
        shadow = new_shadow(num_kept=2)
        first, *_ = cached(shadow, list(range(14)), [4])
        pin = shadow.memory.pin(SPACE, list(range(14)), 10.0)
        assert pin.num_tokens == 4
        for token in range(20, 24):
            computed(shadow, [token] * 5, [4])
        assert shadow.memory.slots.num_evictions > 0
        assert first in shadow.memory.slots.pinned_slots
        assert shadow.memory.divergence(SPACE, list(range(14))).num_cached_tokens == 4
        invariants.check(shadow.memory)

    @pytest.mark.parametrize("end", ["unpin", "time", "clear"])
    def test_a_pin_that_ends_gives_its_state_back_to_the_queue(self, end: str) -> None:
        shadow = new_shadow()
        cached(shadow, list(range(5)), [4])
        pin = shadow.memory.pin(SPACE, list(range(5)), 10.0)
        assert (len(shadow.memory.slots.pinned_slots), shadow.memory.slots.num_cached) == (1, 1)
        if end == "unpin":
            shadow.memory.unpin(pin)
            shadow.memory.unpin(pin)
        elif end == "time":
            shadow.memory.advance(10.0)
        else:
            shadow.memory.clear()
        assert (len(shadow.memory.slots.pinned_slots), shadow.memory.slots.num_cached) == (0, end != "clear")
        invariants.check_at_rest(shadow.memory)

    def test_a_state_that_two_pins_hold_stays_until_the_last_goes(self) -> None:
        shadow = new_shadow()
        cached(shadow, list(range(5)), [4])
        first, second = (shadow.memory.pin(SPACE, list(range(5)), 10.0, tenant) for tenant in ("a", "b"))
        shadow.memory.unpin(first)
        assert len(shadow.memory.slots.pinned_slots) == 1
        shadow.memory.unpin(second)
        assert len(shadow.memory.slots.pinned_slots) == 0

    def test_pins_hold_no_more_than_their_share_of_the_slots(self) -> None:
        shadow = new_shadow(num_kept=4, pin_share=0.5)
        for token in range(3):
            cached(shadow, [token] * 5, [4])
        for token in range(2):
            shadow.memory.pin(SPACE, [token] * 5, 10.0)
        assert shadow.memory.pin(SPACE, [2] * 5, 10.0).num_tokens == 0
        shadow.verify_all()
        assert len(shadow.memory.tables) == 2, "what could not be pinned is let go"

    def test_a_prefix_without_a_state_pins_nothing(self) -> None:
        shadow = new_shadow()
        cached(shadow, list(range(9)), [])
        assert shadow.memory.pin(SPACE, list(range(9)), 10.0).num_tokens == 0
        assert not shadow.memory.tables

    def test_a_pin_shortened_to_before_its_state_pins_nothing(self) -> None:
        shadow = new_shadow(num_blocks=16, num_kept=8, pin_share=0.125)
        cached(shadow, [1] * 12, [12])
        assert shadow.memory.pin(SPACE, [1] * 12, 10.0).num_tokens == 0
        assert len(shadow.memory.slots.pinned_slots) == 0
        shadow.verify_all()


class TestLooking:
    def test_a_state_that_somebody_is_making_again_is_being_computed(self) -> None:
        shadow, tokens = new_shadow(), list(range(14))
        cached(shadow, tokens, [4])
        other = shadow.begin(SPACE, tokens)
        assert shadow.reserve(other, 4)
        assert shadow.memory.divergence(SPACE, tokens) == Divergence(4, MissReason.COMPUTING)
        shadow.finish_step()
        assert shadow.memory.divergence(SPACE, tokens) == Divergence(4, MissReason.STATE_MISSING)

    def test_a_miss_behind_the_last_state_is_told_as_that(self) -> None:
        shadow = new_shadow()
        cached(shadow, list(range(14)), [4])
        told = Divergence(4, MissReason.STATE_MISSING)
        assert shadow.memory.divergence(SPACE, list(range(14))) == told
        assert shadow.memory.divergence(SPACE, list(range(20))) == told
        assert shadow.memory.divergence(SPACE, [*range(8), 99, 99]) == told

    def test_where_the_last_matched_block_has_its_state_the_other_reasons_are_told(self) -> None:
        shadow = new_shadow()
        cached(shadow, list(range(9)), [4, 8])
        divergence = shadow.memory.divergence
        assert divergence(SPACE, list(range(9))) == Divergence(8, MissReason.TOO_SHORT)
        assert divergence(SPACE, [*range(8), 99, 99, 99, 99, 1]) == Divergence(8, MissReason.FIRST_SEEN)
        assert divergence(SPACE, [*range(6), 9, 9, 9]) == Divergence(4, MissReason.DIVERGED, 6, (4, 5, 6, 7))
        shadow.memory.evict(1)
        assert divergence(SPACE, list(range(9))) == Divergence(4, MissReason.EVICTED, evicted_s_ago=0.0)

    def test_slots_are_counted(self) -> None:
        shadow = new_shadow(num_kept=1)
        stats = shadow.memory.stats()
        assert (stats.num_slots, stats.num_cached_slots, stats.num_slot_evictions) == (5, 0, 0)
        for token in range(NUM_RUNNING):
            computed(shadow, [token] * 5, [4])
        stats = shadow.memory.stats()
        assert (stats.num_slots, stats.num_cached_slots, stats.num_slot_evictions) == (5, 1, 3)

    def test_only_what_can_be_used_counts_as_a_hit(self) -> None:
        shadow = new_shadow()
        cached(shadow, list(range(14)), [4])
        before = shadow.memory.stats().hit_tokens
        computed(shadow, list(range(14)), [])
        assert shadow.memory.stats().hit_tokens - before == 4

    def test_a_plain_model_has_no_slots_and_no_states(self) -> None:
        memory = KVMemory(KVMemoryConfig(8, 4), BlockHasher(KEY))
        table = memory.open(SPACE)
        memory.reserve(table, [1] * 5, 5)
        memory.commit(table, 5)
        assert (memory.states, table.state_slot, memory.stats().num_slots) == (None, None, 0)
        assert memory.slots.pop_copies() == ((), ())
