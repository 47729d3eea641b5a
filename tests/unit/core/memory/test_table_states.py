"""The verbs of the memory where a sequence has a recurrent state. What a slot holds is checked by the shadow."""

from quire.core.digests import BlockHasher
from quire.core.divergence import Divergence, MissReason
from quire.core.inspect import invariants
from quire.core.memory.kv_config import KVMemoryConfig
from quire.core.memory.kv_memory import KVMemory
from quire.core.memory.state_slots import ZERO_SLOT, StateCheckpoint
from quire.core.step import SlotCopy
from quire.errors import InvariantError
from tests.support.core.kept_states import NUM_RUNNING, SPACE, cached, computed, config, go_on, hit, new_shadow
from tests.support.core.shadow import KEY, ShadowedMemory, WeakHasher, namespace
from tests.support.errors import raises_code


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
        assert shadow.memory.slots.pop_copies()[0] == (SlotCopy(shadow.memory.slots.cached()[block], table.state_slot),)

    def test_a_sequence_without_a_hit_begins_with_the_state_before_the_first_token(self) -> None:
        memory = KVMemory(config(), BlockHasher(KEY))
        table = memory.open(SPACE)
        memory.match(table, [1, 2])
        assert table.state_slot is None, "who has computed nothing needs none"
        memory.reserve(table, [1, 2], 1)
        memory.commit(table, 1)
        memory.reserve(table, [1, 2], 1)
        assert table.state_slot is not None
        assert memory.slots.pop_copies() == ((SlotCopy(ZERO_SLOT, table.state_slot),), ())

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
        assert (stats.num_cached_slots, shadow.memory.slots.num_reserved, stats.num_named_blocks) == (0, 0, 0)

    def test_a_clear_in_the_middle_of_a_step_breaks_its_promise(self) -> None:
        shadow = new_shadow()
        running = shadow.begin(SPACE, [2] * 5)
        assert shadow.reserve(running, 4, keep=StateCheckpoint.DURABLE)
        shadow.memory.clear()
        shadow.finish_step()
        shadow.verify_all()
        assert (shadow.memory.slots.num_cached, shadow.memory.slots.num_reserved) == (0, 0)

    def test_a_block_whose_digest_collides_carries_no_state(self) -> None:
        shadow = ShadowedMemory(KVMemoryConfig(1024, 1, num_slots=900, num_running_slots=300), hasher=WeakHasher(KEY))
        sequences = [shadow.begin(namespace(1), [index, 7]) for index in range(300)]
        for sequence in sequences:
            assert shadow.reserve(sequence, 1, keep=StateCheckpoint.DURABLE)
        shadow.finish_step()
        shadow.verify_all()
        collided = [sequence for sequence in sequences if not sequence.table.is_naming]
        assert collided
        assert all(one.table.last_cached_block is None for one in collided)
        assert shadow.memory.stats().num_cached_slots == shadow.memory.stats().num_named_blocks

    def test_a_sequence_gives_up_what_it_kept_in_passing_and_nothing_else(self) -> None:
        shadow = new_shadow()
        running = shadow.begin(SPACE, list(range(17)))
        go_on(shadow, running, [4], StateCheckpoint.DURABLE)
        for _ in range(7):
            running.append(1)
        go_on(shadow, running, [20, 24], StateCheckpoint.TRANSIENT)
        kept = [running.table.blocks.index(block) for block in shadow.memory.slots.cached()]
        assert sorted(kept) == [0, 5]


class TestFailures:
    def test_a_failed_row_keeps_nothing_and_goes_back_to_the_last_state(self) -> None:
        shadow = new_shadow()
        sequence = computed(shadow, list(range(14)), [4, 8])
        sequence.append(14)
        sequence.append(15)
        assert shadow.reserve(sequence, 2, keep=StateCheckpoint.DURABLE)
        shadow.finish_row(sequence, 0)
        shadow.verify_all()
        assert (sequence.table.num_computed, len(sequence.table.blocks)) == (8, 2)
        assert shadow.memory.stats().num_cached_slots == 2
        assert shadow.memory.slots.num_reserved == 0
        go_on(shadow, sequence, [16])
        assert hit(shadow, list(range(17))) == 16

    def test_a_row_that_is_true_in_part_goes_back_as_well(self) -> None:
        shadow = new_shadow()
        sequence = computed(shadow, list(range(4)), [4])
        for token in range(4, 12):
            sequence.append(token)
        assert shadow.reserve(sequence, 8, keep=StateCheckpoint.DURABLE)
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
        sequence = computed(shadow, [1] * 5, [4], StateCheckpoint.TRANSIENT)
        (lost, _) = sequence.table.blocks
        shadow.memory.clear()
        sequence.append(1)
        assert shadow.reserve(sequence, 1)
        shadow.finish_row(sequence, 0)
        others = [computed(shadow, [token] * 5, [4], StateCheckpoint.TRANSIENT) for token in (2, 3)]
        assert lost in [one.table.blocks[0] for one in others], "it is somebody else's by now"
        go_on(shadow, sequence, [4], StateCheckpoint.TRANSIENT)
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
            with raises_code(InvariantError, "cannot_fork_table"):
                shadow.memory.fork(sequence.table, num_tokens)

    def test_a_fork_of_nothing_needs_no_state(self) -> None:
        shadow = new_shadow()
        sequence = computed(shadow, list(range(6)), [])
        child = shadow.fork(sequence, 0)
        assert child.table.state_slot is None
        go_on(shadow, child, [4])

    def test_a_fork_gives_up_no_state_of_the_one_it_came_from(self) -> None:
        shadow = new_shadow()
        sequence = computed(shadow, [1] * 4, [4], StateCheckpoint.TRANSIENT)
        child = shadow.fork(sequence, 4)
        for _ in range(4):
            child.append(2)
        go_on(shadow, child, [8], StateCheckpoint.TRANSIENT)
        assert hit(shadow, [1] * 5) == 4

    def test_a_fork_of_a_table_that_lost_its_state_is_noticed(self) -> None:
        shadow = new_shadow()
        sequence = computed(shadow, list(range(6)), [])
        sequence.table.state_slot = None
        with raises_code(InvariantError, "invariant_broken"):
            shadow.memory.fork(sequence.table, 6)


class TestRelease:
    def test_release_gives_the_slot_back_and_the_second_call_does_nothing(self) -> None:
        shadow = new_shadow()
        table = computed(shadow, list(range(6)), [4]).table
        before = len(shadow.memory.slots.blank_slots)
        for _ in range(2):
            shadow.memory.release(table)
        assert len(shadow.memory.slots.blank_slots) == before + 1
        assert table.state_slot is None
        invariants.check_at_rest(shadow.memory)

    def test_a_table_that_computed_nothing_has_no_slot_to_give_back(self) -> None:
        shadow = new_shadow()
        shadow.release(shadow.begin(SPACE, [1, 2]))
        invariants.check_at_rest(shadow.memory)

    def test_a_slot_in_use_is_not_at_rest(self) -> None:
        memory = KVMemory(config(), BlockHasher(KEY))
        memory.slots.begin(None)
        with raises_code(InvariantError, "state_slots_miscounted"):
            invariants.check_at_rest(memory)
