"""The verbs of the memory where a sequence has a recurrent state. Blocks of four tokens; the shadow knows the states."""

import pytest

from quire.core import invariants
from quire.core.digests import BlockHasher
from quire.core.kv_config import KVMemoryConfig
from quire.core.kv_memory import KVMemory
from quire.core.prefix_tree import Divergence, MissReason
from quire.core.state_slots import ZERO_SLOT, Keep, SlotCopy
from quire.errors import ConfigError, InvariantError, PinBudgetError
from tests.support.shadow import KEY, Shadowed, ShadowedMemory, WeakHasher, namespace

SPACE = namespace(block_size=4)
NUM_RUNNING = 4


def config(num_blocks: int = 16, num_kept: int = 6, pin_share: float = 1.0) -> KVMemoryConfig:
    return KVMemoryConfig(num_blocks, 4, pin_share, num_slots=NUM_RUNNING + num_kept, num_running_slots=NUM_RUNNING)


def new_shadow(num_blocks: int = 16, num_kept: int = 6, pin_share: float = 1.0) -> ShadowedMemory:
    return ShadowedMemory(config(num_blocks, num_kept, pin_share))


def go_on(shadow: ShadowedMemory, sequence: Shadowed, borders: list[int], keep: Keep = Keep.LASTING) -> Shadowed:
    """Compute all it knows, and keep the state at these borders."""
    for end in (*borders, len(sequence.tokens)):
        if end > sequence.table.num_computed:
            assert shadow.reserve(sequence, end - sequence.table.num_computed, keep=keep if end in borders else None)
            shadow.finish_step()
            shadow.verify_all()
    return sequence


def computed(shadow: ShadowedMemory, tokens: list[int], borders: list[int], keep: Keep = Keep.LASTING) -> Shadowed:
    return go_on(shadow, shadow.begin(SPACE, tokens), borders, keep)


def cached(shadow: ShadowedMemory, tokens: list[int], borders: list[int], keep: Keep = Keep.LASTING) -> list[int]:
    """The same, and it ends; returns its blocks."""
    sequence = computed(shadow, tokens, borders, keep)
    blocks = list(sequence.table.blocks)
    shadow.release(sequence)
    return blocks


def hit(shadow: ShadowedMemory, tokens: list[int]) -> int:
    """How much of this prompt is found."""
    sequence = shadow.begin(SPACE, tokens)
    num_tokens = sequence.table.num_computed
    shadow.release(sequence)
    return num_tokens


class TestHits:
    def test_a_hit_is_the_deepest_matched_block_that_carries_a_state(self) -> None:
        shadow = new_shadow()
        blocks = cached(shadow, list(range(14)), [4, 8])
        sequence = shadow.begin(SPACE, list(range(14)))
        assert sequence.table.blocks == blocks[:2]
        assert sequence.table.num_matched == 3

    def test_blocks_without_any_state_are_no_hit(self) -> None:
        shadow = new_shadow()
        cached(shadow, list(range(14)), [])
        assert hit(shadow, list(range(14))) == 0

    def test_a_state_deeper_than_the_prompt_is_no_hit(self) -> None:
        shadow = new_shadow()
        cached(shadow, list(range(14)), [8])
        assert hit(shadow, list(range(8))) == 0, "at least one token is left to compute"
        assert hit(shadow, list(range(9))) == 8

    def test_the_blocks_behind_a_state_are_computed_again_and_given_up_for_the_equal_ones(self) -> None:
        shadow = new_shadow()
        blocks = cached(shadow, list(range(14)), [4])
        again = shadow.begin(SPACE, list(range(14)))
        assert shadow.reserve(again, 10)
        assert set(again.table.blocks[1:]).isdisjoint(blocks[:3]), "blocks of its own while it computes"
        shadow.finish_step()
        shadow.verify_all()
        assert again.table.blocks[:3] == blocks[:3]
        assert shadow.memory.stats().num_named_blocks == 3

    def test_a_hit_copies_the_state_into_a_slot_of_its_own(self) -> None:
        shadow = new_shadow()
        (block,) = cached(shadow, list(range(4)), [4])
        table = shadow.begin(SPACE, list(range(5))).table
        assert table.state_slot is not None
        assert shadow.memory.slots.pending_copies == [SlotCopy(shadow.memory.slots.cached()[block], table.state_slot)]

    def test_a_sequence_without_a_hit_begins_with_the_state_before_the_first_token(self) -> None:
        memory = KVMemory(config(), BlockHasher(KEY))
        table = memory.open(SPACE)
        memory.match(table, [1, 2])
        assert table.state_slot is None, "who has computed nothing needs none"
        memory.reserve(table, [1, 2], 1)
        memory.commit(table, 1)
        memory.reserve(table, [1, 2], 1)
        assert table.state_slot is not None
        assert memory.slots.take_moves() == ((SlotCopy(ZERO_SLOT, table.state_slot),), ())

    def test_a_sequence_on_its_way_takes_a_deeper_state_into_the_slot_it_has(self) -> None:
        shadow = new_shadow()
        late = shadow.begin(SPACE, list(range(13)))
        assert shadow.reserve(late, 4)
        shadow.finish_step()
        slot = late.table.state_slot
        cached(shadow, list(range(12)), [8])
        assert shadow.match(late) == 4
        assert late.table.state_slot == slot
        go_on(shadow, late, [])

    def test_who_looks_and_leaves_changes_no_state(self) -> None:
        shadow = new_shadow(num_kept=1)
        (block,) = cached(shadow, list(range(4)), [4])
        for _ in range(3):
            assert hit(shadow, list(range(5))) == 4
        assert (shadow.memory.slots.num_evictions, [*shadow.memory.slots.cached()]) == (0, [block])
        invariants.check_at_rest(shadow.memory)


class TestLeaving:
    def test_a_block_outlives_its_state(self) -> None:
        shadow = new_shadow(num_kept=1)
        cached(shadow, list(range(5)), [4])
        others = [computed(shadow, [30 + at] * 5, [4]) for at in range(NUM_RUNNING)]
        assert shadow.memory.stats().num_slot_evictions >= 1
        assert hit(shadow, list(range(5))) == 0
        assert shadow.memory.divergence(SPACE, list(range(5))) == Divergence(0, MissReason.STATE_MISSING)
        assert shadow.memory.stats().num_named_blocks == 1 + len(others)

    def test_a_state_leaves_with_its_block_when_that_is_evicted(self) -> None:
        shadow = new_shadow()
        cached(shadow, list(range(12)), [4, 8, 12])
        shadow.memory.evict(1)
        assert shadow.memory.stats().num_cached_slots == 2
        assert hit(shadow, list(range(13))) == 8
        shadow.memory.evict(2)
        assert shadow.memory.stats().num_cached_slots == 0
        assert shadow.memory.stats().num_slot_evictions == 0, "they did not have to make room"
        invariants.check_at_rest(shadow.memory)

    def test_a_state_leaves_with_its_block_when_another_sequence_needs_that(self) -> None:
        shadow = new_shadow(num_blocks=4)
        cached(shadow, [1] * 16, [4, 8, 12, 16])
        computed(shadow, [2] * 8, [])
        assert shadow.memory.stats().num_cached_slots == 2
        assert hit(shadow, [1] * 17) == 8

    def test_clearing_takes_every_state_and_leaves_sequences_theirs(self) -> None:
        shadow = new_shadow()
        cached(shadow, [1] * 8, [4, 8])
        running = computed(shadow, [2] * 9, [8])
        shadow.memory.clear()
        shadow.verify_all()
        assert shadow.memory.stats().num_cached_slots == 0
        assert (hit(shadow, [1] * 9), hit(shadow, [2] * 9)) == (0, 0)
        running.append(3)
        go_on(shadow, running, [])

    def test_a_sequence_that_outlived_a_clear_keeps_no_state(self) -> None:
        shadow = new_shadow()
        running = computed(shadow, [2] * 6, [4])
        shadow.memory.clear()
        for _ in range(2):
            running.append(2)
        go_on(shadow, running, [8])
        stats = shadow.memory.stats()
        assert (stats.num_cached_slots, shadow.memory.slots.num_promised, stats.num_named_blocks) == (0, 0, 0)

    def test_a_clear_in_the_middle_of_a_step_breaks_its_promise(self) -> None:
        shadow = new_shadow()
        running = shadow.begin(SPACE, [2] * 5)
        assert shadow.reserve(running, 4, keep=Keep.LASTING)
        shadow.memory.clear()
        shadow.finish_step()
        shadow.verify_all()
        assert (shadow.memory.slots.num_cached, shadow.memory.slots.num_promised) == (0, 0)

    def test_a_block_whose_digest_collides_carries_no_state(self) -> None:
        shadow = ShadowedMemory(KVMemoryConfig(1024, 1, num_slots=900, num_running_slots=300), hasher=WeakHasher(KEY))
        sequences = [shadow.begin(namespace(1), [index, 7]) for index in range(300)]
        for sequence in sequences:
            assert shadow.reserve(sequence, 1, keep=Keep.LASTING)
        shadow.finish_step()
        shadow.verify_all()
        collided = [sequence for sequence in sequences if not sequence.table.is_naming]
        assert collided
        assert all(one.table.last_kept is None for one in collided)
        assert shadow.memory.stats().num_cached_slots == shadow.memory.stats().num_named_blocks

    def test_a_sequence_gives_up_what_it_kept_in_passing_and_nothing_else(self) -> None:
        shadow = new_shadow()
        running = shadow.begin(SPACE, list(range(17)))
        go_on(shadow, running, [4], Keep.LASTING)
        for _ in range(7):
            running.append(1)
        go_on(shadow, running, [20, 24], Keep.PASSING)
        kept = [running.table.blocks.index(block) for block in shadow.memory.slots.cached()]
        assert sorted(kept) == [0, 5]


class TestFailures:
    def test_a_failed_row_keeps_nothing_and_goes_back_to_the_last_state(self) -> None:
        shadow = new_shadow()
        sequence = computed(shadow, list(range(14)), [4, 8])
        sequence.append(14)
        sequence.append(15)
        assert shadow.reserve(sequence, 2, keep=Keep.LASTING)
        shadow.finish_row(sequence, 0)
        shadow.verify_all()
        assert (sequence.table.num_computed, len(sequence.table.blocks)) == (8, 2)
        assert shadow.memory.stats().num_cached_slots == 2
        assert shadow.memory.slots.num_promised == 0
        go_on(shadow, sequence, [16])
        assert hit(shadow, list(range(17))) == 16

    def test_a_row_that_is_true_in_part_goes_back_as_well(self) -> None:
        shadow = new_shadow()
        sequence = computed(shadow, list(range(4)), [4])
        for token in range(4, 12):
            sequence.append(token)
        assert shadow.reserve(sequence, 8, keep=Keep.LASTING)
        shadow.finish_row(sequence, 7)
        shadow.verify_all()
        assert sequence.table.num_computed == 4, "the state behind the seventh is not there"
        assert shadow.memory.stats().num_named_blocks == 2, "the block is true, and stays for others"
        go_on(shadow, sequence, [])

    def test_without_any_state_a_failed_row_goes_back_to_the_beginning(self) -> None:
        shadow = new_shadow()
        sequence = computed(shadow, list(range(6)), [])
        slot = sequence.table.state_slot
        sequence.append(6)
        assert shadow.reserve(sequence, 1)
        shadow.finish_row(sequence, 0)
        shadow.verify_all()
        assert (sequence.table.num_computed, sequence.table.blocks, sequence.table.state_slot) == (0, [], slot)
        go_on(shadow, sequence, [])

    def test_who_went_back_behind_a_clear_names_blocks_again(self) -> None:
        shadow = new_shadow()
        sequence = computed(shadow, list(range(6)), [4])
        shadow.memory.clear()
        sequence.append(6)
        assert shadow.reserve(sequence, 1)
        shadow.finish_row(sequence, 0)
        go_on(shadow, sequence, [4])
        assert hit(shadow, list(range(6))) == 4

    def test_who_went_back_leaves_the_states_of_others_alone(self) -> None:
        shadow = new_shadow()
        sequence = computed(shadow, [1] * 5, [4], Keep.PASSING)
        (lost, _) = sequence.table.blocks
        shadow.memory.clear()
        sequence.append(1)
        assert shadow.reserve(sequence, 1)
        shadow.finish_row(sequence, 0)
        others = [computed(shadow, [token] * 5, [4], Keep.PASSING) for token in (2, 3)]
        assert lost in [one.table.blocks[0] for one in others], "it is somebody else's by now"
        go_on(shadow, sequence, [4], Keep.PASSING)
        assert [hit(shadow, [token] * 5) for token in (1, 2, 3)] == [4, 4, 4]


class TestForks:
    def test_a_fork_has_the_state_of_all_that_is_computed(self) -> None:
        shadow = new_shadow()
        sequence = computed(shadow, list(range(6)), [4])
        child = shadow.fork(sequence, 6)
        assert child.table.state_slot not in (None, sequence.table.state_slot)
        for one in (sequence, child):
            one.append(9)
            go_on(shadow, one, [])

    def test_a_fork_of_fewer_tokens_is_refused_for_there_is_no_state_of_them(self) -> None:
        shadow = new_shadow()
        sequence = computed(shadow, list(range(6)), [4])
        for num_tokens in (4, 5, 7):
            with pytest.raises(InvariantError, match=f"at rest with {num_tokens} tokens computed, and no more"):
                shadow.memory.fork(sequence.table, num_tokens)

    def test_a_fork_of_nothing_needs_no_state(self) -> None:
        shadow = new_shadow()
        sequence = computed(shadow, list(range(6)), [])
        child = shadow.fork(sequence, 0)
        assert child.table.state_slot is None
        go_on(shadow, child, [4])

    def test_a_fork_gives_up_no_state_of_the_one_it_came_from(self) -> None:
        shadow = new_shadow()
        sequence = computed(shadow, [1] * 4, [4], Keep.PASSING)
        child = shadow.fork(sequence, 4)
        for _ in range(4):
            child.append(2)
        go_on(shadow, child, [8], Keep.PASSING)
        assert hit(shadow, [1] * 5) == 4

    def test_a_fork_of_a_table_that_lost_its_state_is_noticed(self) -> None:
        shadow = new_shadow()
        sequence = computed(shadow, list(range(6)), [])
        sequence.table.state_slot = None
        with pytest.raises(InvariantError, match="has computed 6 tokens and no state"):
            shadow.memory.fork(sequence.table, 6)


class TestRelease:
    def test_release_gives_the_slot_back_and_the_second_call_does_nothing(self) -> None:
        shadow = new_shadow()
        table = computed(shadow, list(range(6)), [4]).table
        before = len(shadow.memory.slots.blank)
        for _ in range(2):
            shadow.memory.release(table)
        assert len(shadow.memory.slots.blank) == before + 1
        assert table.state_slot is None
        invariants.check_at_rest(shadow.memory)

    def test_a_table_that_computed_nothing_has_no_slot_to_give_back(self) -> None:
        shadow = new_shadow()
        shadow.release(shadow.begin(SPACE, [1, 2]))
        invariants.check_at_rest(shadow.memory)

    def test_a_slot_in_use_is_not_at_rest(self) -> None:
        memory = KVMemory(config(), BlockHasher(KEY))
        memory.slots.begin(None)
        with pytest.raises(InvariantError, match=r"missing"):
            invariants.check_at_rest(memory)


class TestMisuse:
    def test_drafts_are_refused(self) -> None:
        memory = KVMemory(config(), BlockHasher(KEY))
        table = memory.open(SPACE)
        with pytest.raises(InvariantError, match="2 drafts given; a wrong one could not be taken out of a state"):
            memory.reserve(table, [1, 2], 2, [3, 4])
        assert memory.num_free_blocks == 16

    @pytest.mark.parametrize("num_tokens", [1, 3, 5])
    def test_a_state_beside_a_border_is_refused(self, num_tokens: int) -> None:
        memory = KVMemory(config(), BlockHasher(KEY))
        table = memory.open(SPACE)
        with pytest.raises(InvariantError, match=f"on a block border of a model that has one, not at {num_tokens}"):
            memory.reserve(table, [1] * 6, num_tokens, keep=Keep.LASTING)
        assert memory.num_free_blocks == 16

    def test_a_state_of_a_model_without_any_is_refused(self) -> None:
        memory = KVMemory(KVMemoryConfig(8, 4), BlockHasher(KEY))
        with pytest.raises(InvariantError, match="a model that has one"):
            memory.reserve(memory.open(SPACE), [1] * 4, 4, keep=Keep.LASTING)

    @pytest.mark.parametrize(("num_slots", "num_running"), [(4, 0), (4, 5), (0, 1), (-1, -1), (4, -1)])
    def test_slots_that_leave_nobody_one_to_run_in_are_refused(self, num_slots: int, num_running: int) -> None:
        with pytest.raises(ConfigError, match=f"of {num_slots} state slots .* {num_running} given"):
            KVMemoryConfig(8, 4, num_slots=num_slots, num_running_slots=num_running)

    def test_a_state_for_which_there_is_no_slot_is_not_kept_and_nothing_else_changes(self) -> None:
        shadow = new_shadow(num_kept=0)
        sequence = computed(shadow, list(range(9)), [4, 8])
        assert (sequence.table.num_computed, shadow.memory.slots.num_cached) == (9, 0)


class TestPins:
    def test_a_pin_holds_blocks_up_to_the_deepest_state_and_that_state(self) -> None:
        shadow = new_shadow(num_kept=2)
        first, *_ = cached(shadow, list(range(14)), [4])
        pin = shadow.memory.pin(SPACE, list(range(14)), 10.0)
        assert pin.num_tokens == 4
        for token in range(20, 24):
            computed(shadow, [token] * 5, [4])
        assert shadow.memory.slots.num_evictions > 0
        assert shadow.memory.slots.is_pinned(first)
        assert shadow.memory.divergence(SPACE, list(range(14))).num_cached_tokens == 4
        invariants.check(shadow.memory)

    @pytest.mark.parametrize("end", ["unpin", "time", "clear"])
    def test_a_pin_that_ends_gives_its_state_back_to_the_queue(self, end: str) -> None:
        shadow = new_shadow()
        cached(shadow, list(range(5)), [4])
        pin = shadow.memory.pin(SPACE, list(range(5)), 10.0)
        assert (shadow.memory.slots.num_pinned, shadow.memory.slots.num_cached) == (1, 1)
        if end == "unpin":
            shadow.memory.unpin(pin)
            shadow.memory.unpin(pin)
        elif end == "time":
            shadow.memory.advance(10.0)
        else:
            shadow.memory.clear()
        assert (shadow.memory.slots.num_pinned, shadow.memory.slots.num_cached) == (0, end != "clear")
        invariants.check_at_rest(shadow.memory)

    def test_a_state_that_two_pins_hold_stays_until_the_last_goes(self) -> None:
        shadow = new_shadow()
        cached(shadow, list(range(5)), [4])
        first, second = (shadow.memory.pin(SPACE, list(range(5)), 10.0) for _ in range(2))
        shadow.memory.unpin(first)
        assert shadow.memory.slots.num_pinned == 1
        shadow.memory.unpin(second)
        assert shadow.memory.slots.num_pinned == 0

    def test_pins_hold_no_more_than_their_share_of_the_slots(self) -> None:
        shadow = new_shadow(num_kept=4, pin_share=0.5)
        for token in range(3):
            cached(shadow, [token] * 5, [4])
        for token in range(2):
            shadow.memory.pin(SPACE, [token] * 5, 10.0)
        with pytest.raises(PinBudgetError, match="may hold 50% of the state slots that no running .*, 2 are pinned"):
            shadow.memory.pin(SPACE, [2] * 5, 10.0)
        shadow.verify_all()
        assert len(shadow.memory.tables) == 2, "what could not be pinned is let go"

    def test_a_prefix_without_a_state_pins_nothing(self) -> None:
        shadow = new_shadow()
        cached(shadow, list(range(9)), [])
        assert shadow.memory.pin(SPACE, list(range(9)), 10.0).num_tokens == 0
        assert not shadow.memory.tables

    def test_a_pin_refused_for_its_blocks_pins_no_state(self) -> None:
        shadow = new_shadow(num_blocks=16, num_kept=8, pin_share=0.125)
        cached(shadow, [1] * 12, [12])
        with pytest.raises(PinBudgetError, match="may hold 2 blocks"):
            shadow.memory.pin(SPACE, [1] * 12, 10.0)
        assert shadow.memory.slots.num_pinned == 0
        shadow.verify_all()


class TestLooking:
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
        assert memory.slots.take_moves() == ((), ())
