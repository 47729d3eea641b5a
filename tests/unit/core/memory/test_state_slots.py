"""The pool of state slots alone: who gets which slot, which cached state leaves, and what a runner is told to move.

Blocks are numbers from 10 on here, so that none is taken for a slot.
"""

import pytest

from quire.core.memory.state_slots import ZERO_SLOT, StateCheckpoint, StateSlots
from quire.core.step import SlotCopy
from quire.errors import InvariantError
from tests.support.errors import raises_code

DURABLE, TRANSIENT, SPARSE = StateCheckpoint.DURABLE, StateCheckpoint.TRANSIENT, StateCheckpoint.SPARSE


def kept(
    slots: StateSlots, block: int, kind: StateCheckpoint = DURABLE, last_block: int | None = None, running: int = 1
) -> int:
    """A step leaves its state behind this block."""
    slot = slots.reserve(running, last_block)
    assert slot is not None
    slots.attach(block, slot, kind)
    return slot


class TestRunning:
    def test_slots_are_handed_out_from_one_on_and_never_slot_zero(self) -> None:
        slots = StateSlots(4, 4)
        assert sorted(slots.begin(None) for _ in range(4)) == [1, 2, 3, 4]

    def test_one_sequence_too_many_is_a_bug_and_not_a_second_use_of_a_slot(self) -> None:
        slots = StateSlots(2, 2)
        slots.begin(None)
        slots.begin(None)
        with raises_code(InvariantError, "invariant_broken"):
            slots.begin(None)

    def test_who_begins_with_nothing_gets_the_state_before_the_first_token(self) -> None:
        slots = StateSlots(3, 3)
        running = slots.begin(None)
        assert slots.pop_copies()[0] == (SlotCopy(ZERO_SLOT, running),)

    def test_who_begins_again_keeps_its_slot(self) -> None:
        slots = StateSlots(3, 1)
        source, running = kept(slots, 10), slots.begin(None)
        slots.pop_copies()
        assert (slots.begin(running), slots.begin_after(10, running)) == (running, running)
        assert slots.pop_copies()[0] == (SlotCopy(ZERO_SLOT, running), SlotCopy(source, running))

    def test_who_goes_on_behind_a_block_gets_a_copy_and_the_block_keeps_its_state(self) -> None:
        slots = StateSlots(3, 1)
        source = kept(slots, 10)
        running = slots.begin_after(10, None)
        assert running != source
        assert slots.pop_copies()[0] == (SlotCopy(source, running),)
        assert slots.slot_of(10) == source

    def test_where_nothing_else_makes_room_the_state_itself_is_run_from(self) -> None:
        slots = StateSlots(2, 1)
        slots.begin(None)
        source = kept(slots, 10)
        slots.pop_copies()
        assert slots.begin_after(10, None) == source
        assert slots.slot_of(10) is None
        assert slots.pop_copies()[0] == ()

    def test_a_fork_gets_a_copy_in_a_slot_of_its_own(self) -> None:
        slots = StateSlots(2, 2)
        running = slots.begin(None)
        child = slots.fork(running)
        assert child != running
        assert slots.pop_copies()[0] == (SlotCopy(ZERO_SLOT, running), SlotCopy(running, child))

    def test_a_slot_given_back_is_taken_again_before_a_state_has_to_leave(self) -> None:
        slots = StateSlots(2, 1)
        running = slots.begin(None)
        kept(slots, 10)
        slots.give_back(running)
        assert slots.begin(None) == running
        assert (slots.num_cached, slots.num_evictions) == (1, 0)

    def test_running_slots_are_always_there_whatever_is_promised_and_pinned(self) -> None:
        slots = StateSlots(6, 3)
        kept(slots, 10)
        slots.pin_state(10)
        reserved = [slots.reserve(1, None) for _ in range(5)]
        assert [slot is None for slot in reserved] == [False, False, True, True, True]
        assert len({slots.begin(None) for _ in range(3)} | {slots.slot_of(10), *reserved[:2]}) == 6


class TestKeeping:
    def test_a_promise_is_a_move_after_the_step_from_the_running_slot(self) -> None:
        slots = StateSlots(3, 1)
        running = slots.begin(None)
        reserved = slots.reserve(running, None)
        assert reserved is not None
        assert slots.num_reserved == 1
        assert slots.pop_copies() == ((SlotCopy(ZERO_SLOT, running),), (SlotCopy(running, reserved),))

    def test_every_move_is_told_once_and_in_the_order_it_was_asked_for(self) -> None:
        slots = StateSlots(6, 4)
        source = kept(slots, 10)
        slots.pop_copies()
        first, second = slots.begin_after(10, None), slots.begin(None)
        child = slots.fork(first)
        copies, cache_copies = slots.pop_copies()
        assert copies == (SlotCopy(source, first), SlotCopy(ZERO_SLOT, second), SlotCopy(first, child))
        assert cache_copies == ()
        assert slots.pop_copies() == ((), ())

    def test_a_state_is_nobodys_before_its_step_has_returned(self) -> None:
        slots = StateSlots(3, 1)
        reserved = slots.reserve(1, None)
        assert (slots.num_cached, slots.slot_of(10)) == (0, None)
        assert reserved is not None
        slots.attach(10, reserved, DURABLE)
        assert (slots.num_cached, slots.num_reserved, slots.slot_of(10)) == (1, 0, reserved)

    def test_a_broken_promise_gives_its_slot_back(self) -> None:
        slots = StateSlots(2, 1)
        reserved = slots.reserve(1, None)
        assert reserved is not None
        slots.free_reserved(reserved)
        assert (slots.num_reserved, slots.num_cached, reserved in slots.blank_slots) == (0, 0, True)

    def test_of_two_equal_states_the_first_stays_and_counts_as_used(self) -> None:
        slots = StateSlots(6, 1)
        first = kept(slots, 10, TRANSIENT)
        kept(slots, 11)
        second = kept(slots, 10, TRANSIENT)
        assert slots.slot_of(10) == first
        assert second in slots.blank_slots
        assert 10 not in slots.transients
        assert [*slots.cached()] == [11, 10]
        assert slots.num_reserved == 0

    def test_a_state_kept_in_passing_is_given_up_for_the_next_of_its_sequence(self) -> None:
        slots = StateSlots(9, 1)
        first = kept(slots, 10, TRANSIENT)
        assert (len(slots.transients), 10 in slots.transients) == (1, True)
        assert kept(slots, 11, TRANSIENT, last_block=10) == first
        assert [*slots.cached()] == [11]
        assert len(slots.transients) == 1
        assert slots.num_evictions == 0, "it did not make room for somebody else"

    def test_it_stays_once_somebody_has_used_it(self) -> None:
        slots = StateSlots(9, 1)
        kept(slots, 10, TRANSIENT)
        slots.use(10)
        kept(slots, 11, TRANSIENT, last_block=10)
        assert [*slots.cached()] == [10, 11]

    @pytest.mark.parametrize("keep", [DURABLE, SPARSE])
    def test_other_states_are_not_given_up(self, keep: StateCheckpoint) -> None:
        slots = StateSlots(9, 1)
        kept(slots, 10, keep)
        kept(slots, 11, TRANSIENT, last_block=10)
        assert {*slots.cached()} == {10, 11}

    def test_another_sequence_takes_a_slot_of_its_own(self) -> None:
        slots = StateSlots(9, 1)
        kept(slots, 10, TRANSIENT)
        kept(slots, 11, TRANSIENT, last_block=None)
        kept(slots, 12, TRANSIENT, last_block=11)
        assert [*slots.cached()] == [10, 12]


class TestLeaving:
    def test_the_least_recently_used_state_leaves_first(self) -> None:
        slots = StateSlots(4, 1)
        for block in (10, 11, 12):
            kept(slots, block)
        slots.begin(None)
        slots.use(10)
        kept(slots, 13)
        assert [*slots.cached()] == [12, 10, 13]
        assert slots.num_evictions == 1
        slots.begin_after(12, None)
        assert [*slots.cached()] == [13, 12], "the hit made the coldest state leave, and is not the coldest any more"

    def test_sparse_states_leave_before_all_others(self) -> None:
        slots = StateSlots(4, 1)
        kept(slots, 10)
        kept(slots, 11, TRANSIENT)
        kept(slots, 12, SPARSE)
        slots.begin(None)
        kept(slots, 13)
        assert [*slots.cached()] == [10, 11, 13]

    def test_a_sparse_state_that_was_used_leaves_in_its_turn(self) -> None:
        slots = StateSlots(4, 1)
        kept(slots, 10, SPARSE)
        kept(slots, 11)
        slots.use(10)
        assert [*slots.cached()] == [11, 10]

    def test_a_passing_state_that_has_left_is_not_passing(self) -> None:
        slots = StateSlots(2, 1)
        kept(slots, 10, TRANSIENT)
        slots.begin(None)
        slots.begin(None)
        assert (len(slots.transients), slots.slot_of(10)) == (0, None)

    def test_a_state_leaves_with_its_block(self) -> None:
        slots = StateSlots(4, 1)
        slot = kept(slots, 10, TRANSIENT)
        kept(slots, 11)
        slots.forget([10, 99])
        assert [*slots.cached()] == [11]
        assert slot in slots.blank_slots
        assert (len(slots.transients), slots.num_evictions) == (0, 0)

    def test_clearing_takes_all_states_the_pinned_ones_too(self) -> None:
        slots = StateSlots(4, 1)
        kept(slots, 10, TRANSIENT)
        kept(slots, 11)
        slots.pin_state(11)
        slots.clear()
        assert (slots.num_cached, len(slots.pinned_slots), len(slots.transients), sorted(slots.blank_slots)) == (
            0,
            0,
            0,
            [1, 2, 3, 4],
        )

    def test_the_deepest_block_with_a_state_says_how_many_are_usable(self) -> None:
        slots = StateSlots(5, 1)
        kept(slots, 10)
        kept(slots, 12)
        slots.pin_state(12)
        assert slots.num_usable([10, 11, 12, 13]) == 3
        assert slots.num_usable([10, 11]) == 1
        assert slots.num_usable([11, 13]) == 0
        assert slots.num_usable([]) == 0


class TestPinning:
    def test_a_pinned_state_does_not_leave_and_cannot_be_forgotten(self) -> None:
        slots = StateSlots(4, 2)
        slot = kept(slots, 10)
        slots.pin_state(10)
        for block in (11, 12, 13, 14):
            kept(slots, block)
        assert (slots.slot_of(10), slots.use(10), len(slots.pinned_slots)) == (slot, slot, 1)
        with raises_code(InvariantError, "invariant_broken"):
            slots.forget([10])

    def test_a_pinned_state_is_in_passing_no_more(self) -> None:
        slots = StateSlots(4, 2)
        kept(slots, 10, TRANSIENT)
        slots.pin_state(10)
        assert 10 not in slots.transients
        kept(slots, 11, TRANSIENT, last_block=10)
        assert slots.slot_of(10) is not None

    def test_a_block_without_a_state_has_nothing_to_pin(self) -> None:
        slots = StateSlots(4, 2)
        slots.pin_state(10)
        slots.unpin_states([10])
        assert (len(slots.pinned_slots), slots.num_cached) == (0, 0)

    def test_an_unpinned_state_is_the_most_recently_used(self) -> None:
        slots = StateSlots(5, 2)
        kept(slots, 10)
        slots.pin_state(10)
        kept(slots, 11)
        assert [*slots.cached()] == [11, 10]
        slots.unpin_states([10, 11, 12])
        kept(slots, 12)
        assert [*slots.cached()] == [11, 10, 12]
        assert 10 not in slots.pinned_slots

    def test_pins_may_hold_their_share_of_what_nobody_needs_to_run(self) -> None:
        slots = StateSlots(6, 2)
        kept(slots, 10)
        kept(slots, 11)
        kept(slots, 12)
        assert slots.may_pin(10, 0.25)
        slots.pin_state(10)
        assert not slots.may_pin(11, 0.25)
        assert slots.may_pin(10, 0.25), "it is pinned already"
        assert slots.may_pin(11, 0.5)

    def test_what_a_step_has_been_promised_is_not_pinned_away(self) -> None:
        slots = StateSlots(3, 1)
        kept(slots, 10)
        slots.reserve(1, None)
        assert slots.may_pin(10, 1.0)
        slots.reserve(1, None)
        assert not slots.may_pin(10, 1.0)
