"""The verbs of the memory, one promise at a time. Blocks of four tokens; what a slot holds is checked by the shadow."""

import gc

import pytest

from quire.core.digests import BlockHasher
from quire.core.events import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent
from quire.core.inspect import invariants
from quire.core.memory.kv_config import KVMemoryConfig
from quire.core.memory.kv_memory import KVMemory
from quire.core.step import BlockCopy
from quire.errors import ConfigError, InvariantError, OutOfBlocksError
from tests.support.core.shadow import KEY, Shadowed, ShadowedMemory, WeakHasher, namespace
from tests.support.errors import raises_code

SPACE = namespace(block_size=4)


def new_shadow(num_blocks: int = 8) -> ShadowedMemory:
    return ShadowedMemory(KVMemoryConfig(num_blocks, 4, pin_share=0.25))


def computed(shadow: ShadowedMemory, tokens: list[int]) -> Shadowed:
    """A sequence all of whose tokens are computed."""
    sequence = shadow.begin(SPACE, tokens)
    assert shadow.reserve(sequence, sequence.num_uncomputed)
    shadow.finish_step()
    shadow.verify_all()
    return sequence


class TestHits:
    def test_a_hit_shares_the_same_physical_blocks(self) -> None:
        shadow = new_shadow()
        first = computed(shadow, list(range(9)))
        second = shadow.begin(SPACE, list(range(9)))
        assert second.table.num_computed == 8
        assert second.table.blocks == first.table.blocks[:2]
        assert [shadow.memory.pool.ref_count[block] for block in second.table.blocks] == [2, 2]

    def test_a_released_prefix_is_hit_again(self) -> None:
        shadow = new_shadow()
        shadow.release(computed(shadow, list(range(9))))
        assert shadow.begin(SPACE, list(range(9))).table.num_computed == 8

    def test_a_prompt_that_is_cached_whole_leaves_its_last_block_to_compute(self) -> None:
        shadow = new_shadow()
        shadow.release(computed(shadow, list(range(8))))
        assert shadow.begin(SPACE, list(range(8))).table.num_computed == 4

    def test_a_partial_block_is_never_hit(self) -> None:
        shadow = new_shadow()
        computed(shadow, list(range(6)))
        assert shadow.begin(SPACE, list(range(9))).table.num_computed == 4

    def test_a_block_is_not_hittable_before_the_step_that_writes_it_has_returned(self) -> None:
        shadow = new_shadow()
        writer = shadow.begin(SPACE, list(range(9)))
        assert shadow.reserve(writer, 9)
        assert shadow.begin(SPACE, list(range(9))).table.num_computed == 0
        shadow.finish_step()
        assert shadow.begin(SPACE, list(range(9))).table.num_computed == 8

    def test_a_sequence_can_look_again_when_others_have_computed_more(self) -> None:
        shadow = new_shadow(16)
        late = shadow.begin(SPACE, list(range(13)))
        computed(shadow, list(range(9)))
        assert shadow.match(late) == 8
        assert shadow.match(late) == 0

    def test_a_table_inside_a_block_gets_no_hits(self) -> None:
        shadow = new_shadow(16)
        late = shadow.begin(SPACE, list(range(13)))
        assert shadow.reserve(late, 2)
        assert shadow.match(late) == 0
        shadow.finish_step()
        computed(shadow, list(range(9)))
        assert shadow.match(late) == 0

    def test_other_groups_adapters_and_orders_never_hit(self) -> None:
        shadow = new_shadow(16)
        computed(shadow, list(range(9)))
        for space in (namespace(4, "other"), namespace(4, adapter="lora")):
            assert shadow.begin(space, list(range(9))).table.num_computed == 0
        assert shadow.begin(SPACE, [4, 5, 6, 7, 0, 1, 2, 3, 8]).table.num_computed == 0

    def test_a_query_counts_once_and_only_when_the_sequence_goes_on(self) -> None:
        shadow = new_shadow()
        shadow.release(computed(shadow, list(range(9))))
        before = shadow.memory.stats()
        shadow.release(shadow.begin(SPACE, list(range(9))))
        assert shadow.memory.stats() == before
        sequence = shadow.begin(SPACE, list(range(9)))
        shadow.match(sequence)
        assert shadow.reserve(sequence, 1)
        after = shadow.memory.stats()
        assert after.query_tokens - before.query_tokens == 9
        assert after.hit_tokens - before.hit_tokens == 8

    def test_looking_again_later_adds_hits_and_no_second_query(self) -> None:
        shadow = new_shadow(16)
        late = shadow.begin(SPACE, list(range(13)))
        assert shadow.reserve(late, 4)
        shadow.finish_step()
        computed(shadow, list(range(9)))
        before = shadow.memory.stats()
        assert shadow.match(late) == 4
        assert shadow.reserve(late, 1)
        after = shadow.memory.stats()
        assert (after.query_tokens - before.query_tokens, after.hit_tokens - before.hit_tokens) == (0, 4)

    def test_whether_a_wanted_block_is_being_computed_can_be_asked(self) -> None:
        memory = KVMemory(KVMemoryConfig(8, 4), BlockHasher(KEY))
        writer, waiter, tokens = memory.open(SPACE), memory.open(SPACE), list(range(9))
        assert not memory.is_computing(waiter, tokens)
        memory.reserve(writer, tokens, 4)
        assert memory.is_computing(waiter, tokens)
        assert not memory.is_computing(waiter, tokens[:4]), "above the hit cap there is nothing to wait for"
        memory.commit(writer, 4)
        assert not memory.is_computing(waiter, tokens)
        memory.reserve(waiter, tokens, 2)
        assert not memory.is_computing(waiter, tokens), "it has computed part of the block itself"

    def test_two_tables_that_compute_the_same_block_leave_the_flight_one_by_one(self) -> None:
        memory = KVMemory(KVMemoryConfig(8, 4), BlockHasher(KEY))
        one, two, waiter = memory.open(SPACE), memory.open(SPACE), memory.open(SPACE)
        memory.reserve(one, [1, 2, 3, 4, 5], 4)
        memory.reserve(two, [1, 2, 3, 4, 5], 4)
        memory.commit(one, 0)
        assert memory.is_computing(waiter, [1, 2, 3, 4, 5])
        memory.commit(two, 4)
        assert not memory.in_flight


class TestNames:
    def test_the_second_to_compute_a_block_takes_the_first_ones(self) -> None:
        shadow = new_shadow()
        one, two = shadow.begin(SPACE, list(range(9))), shadow.begin(SPACE, list(range(9)))
        assert shadow.reserve(one, 9)
        assert shadow.reserve(two, 9)
        shadow.finish_step()
        assert one.table.blocks[:2] == two.table.blocks[:2]
        assert one.table.blocks[2] != two.table.blocks[2]
        assert shadow.memory.stats().num_referenced_blocks == 4

    def test_blocks_of_a_failed_row_are_never_named(self) -> None:
        shadow = new_shadow()
        sequence = shadow.begin(SPACE, list(range(9)))
        assert shadow.reserve(sequence, 9)
        shadow.finish_step(failed=[0])
        assert shadow.memory.stats().num_named_blocks == 0
        assert shadow.begin(SPACE, list(range(9))).table.num_computed == 0
        assert shadow.memory.stats().num_blank_blocks == 8

    def test_tokens_rejected_by_a_step_may_come_back_as_others(self) -> None:
        memory = KVMemory(KVMemoryConfig(8, 4), BlockHasher(KEY))
        table = memory.open(SPACE)
        memory.reserve(table, [1, 2, 3, 4, 5, 6, 7, 8], 8)
        memory.commit(table, 6)
        assert (table.num_computed, len(table.blocks)) == (6, 2)
        memory.reserve(table, [1, 2, 3, 4, 5, 6, 9, 9], 2)
        memory.commit(table, 2)
        invariants.check(memory)
        assert memory.divergence(SPACE, [1, 2, 3, 4, 5, 6, 9, 9, 0]).num_cached_tokens == 8
        assert memory.divergence(SPACE, [1, 2, 3, 4, 5, 6, 7, 8, 0]).num_cached_tokens == 4

    def test_blocks_of_right_drafts_are_named_and_of_wrong_ones_given_back(self) -> None:
        memory = KVMemory(KVMemoryConfig(8, 4), BlockHasher(KEY))
        table = memory.open(SPACE)
        memory.reserve(table, [1, 2, 3], 3, [4, 5, 6, 7, 8, 9])
        assert (table.num_reserved, len(table.blocks)) == (9, 3)
        memory.commit(table, 5)
        invariants.check(memory)
        assert (table.num_computed, len(table.blocks), memory.pool.num_free) == (5, 2, 6)
        assert memory.divergence(SPACE, [1, 2, 3, 4, 5, 6, 7, 8, 9]).num_cached_tokens == 4
        memory.reserve(table, [1, 2, 3, 4, 5, 0], 1, [0, 0])
        memory.commit(table, 3)
        invariants.check(memory)
        assert memory.divergence(SPACE, [1, 2, 3, 4, 5, 0, 0, 0, 9]).num_cached_tokens == 8
        assert memory.divergence(SPACE, [1, 2, 3, 4, 5, 6, 7, 8, 9]).num_cached_tokens == 4

    def test_nobody_waits_for_a_block_that_holds_a_guess(self) -> None:
        memory = KVMemory(KVMemoryConfig(8, 4), BlockHasher(KEY))
        writer, waiter = memory.open(SPACE), memory.open(SPACE)
        memory.reserve(writer, [1, 2, 3, 4, 5], 5, [6, 7, 8])
        assert memory.is_computing(waiter, [1, 2, 3, 4, 5])
        assert len(memory.in_flight) == 1
        invariants.check(memory)
        memory.commit(writer, 8)
        assert memory.match(waiter, [1, 2, 3, 4, 5, 6, 7, 8, 9]) == 8

    def test_a_failed_row_gives_back_what_it_took_and_keeps_its_copy(self) -> None:
        shadow = new_shadow()
        sequence = computed(shadow, list(range(5)))
        child = shadow.fork(sequence, 5)
        child.append(7)
        assert shadow.reserve(child, 1, [1, 2, 3])
        shadow.finish_row(child, 0)
        assert len(child.table.blocks) == 2
        assert child.table.blocks[1] != sequence.table.blocks[1]
        shadow.verify_all()

    def test_tokens_that_change_before_they_are_computed_are_named_as_what_they_became(self) -> None:
        for look in ("reserve", "match", "is_computing"):
            memory = KVMemory(KVMemoryConfig(4, 4), BlockHasher(KEY))
            hog, table = memory.open(SPACE), memory.open(SPACE)
            memory.reserve(hog, [7] * 12, 12)
            guess, truth = [1, 2, 3, 4, 5], [1, 2, 9, 9, 9]
            if look == "reserve":
                with pytest.raises(OutOfBlocksError):
                    memory.reserve(table, guess, 5)
            elif look == "match":
                memory.match(table, guess)
            else:
                memory.is_computing(table, guess)
            memory.reserve(table, truth, 4)
            memory.commit(table, 4)
            assert memory.divergence(SPACE, guess).num_cached_tokens == 0, look
            assert memory.divergence(SPACE, truth).num_cached_tokens == 4, look

    def test_a_bad_token_in_the_middle_leaves_everything_in_order(self) -> None:
        memory = KVMemory(KVMemoryConfig(16, 4), BlockHasher(KEY))
        table = memory.open(SPACE)
        memory.reserve(table, [1] * 8, 8)
        memory.commit(table, 8)
        memory.release(table)
        table = memory.open(SPACE)
        with pytest.raises(OverflowError):
            memory.match(table, [1] * 8 + [2**32] * 4 + [1])
        assert (table.num_computed, memory.pool.num_referenced) == (0, 0)
        invariants.check(memory)
        with pytest.raises(OverflowError):
            memory.pin(SPACE, [1] * 4 + [-1] * 4, 10.0)
        assert len(memory.tables) == 1
        invariants.check(memory)

    def test_a_sequence_whose_digest_collides_stops_naming_and_stays_right(self) -> None:
        shadow = ShadowedMemory(KVMemoryConfig(4096, 1), hasher=WeakHasher(KEY))
        space = namespace(1)
        sequences = [shadow.begin(space, [index, index + 1, index + 2]) for index in range(300)]
        for sequence in sequences:
            assert shadow.reserve(sequence, 3)
        shadow.finish_step()
        shadow.verify_all()
        assert shadow.memory.stats().num_collisions > 0
        collided = [sequence for sequence in sequences if not sequence.table.is_naming]
        assert collided
        child = shadow.fork(collided[0], 3)
        child.append(7)
        assert shadow.reserve(child, 1)
        assert not shadow.memory.is_computing(child.table, child.tokens)
        shadow.finish_step()
        shadow.verify_all()

    def test_a_parent_in_the_tree_is_the_block_before_in_the_table(self) -> None:
        shadow = new_shadow()
        sequence = computed(shadow, list(range(12)))
        blocks, tree = sequence.table.blocks, shadow.memory.tree
        assert [tree.parent_of(block) for block in blocks] == [sequence.table.root, blocks[0], blocks[1]]


class TestForks:
    def test_a_fork_shares_every_block_and_copies_none(self) -> None:
        shadow = new_shadow()
        sequence = computed(shadow, list(range(9)))
        child = shadow.fork(sequence, 9)
        assert child.table.blocks == sequence.table.blocks
        assert shadow.memory.stats().num_block_copies == 0

    def test_writing_into_a_shared_tail_plans_one_copy(self) -> None:
        shadow = new_shadow()
        sequence = computed(shadow, list(range(10)))
        child = shadow.fork(sequence, 9)
        tail = sequence.table.blocks[2]
        copy = shadow.memory.reserve(child.table, child.tokens, 1)
        assert copy == BlockCopy(tail, child.table.blocks[2])
        assert child.table.blocks[2] != tail
        assert shadow.memory.pool.ref_count[tail] == 2, "held until the step has returned"
        shadow.memory.commit(child.table, 1)
        assert shadow.memory.pool.ref_count[tail] == 1
        invariants.check(shadow.memory)

    def test_the_last_holder_of_a_tail_writes_in_place(self) -> None:
        shadow = new_shadow()
        sequence = computed(shadow, list(range(9)))
        child = shadow.fork(sequence, 9)
        shadow.release(sequence)
        child.append(1)
        assert shadow.memory.reserve(child.table, child.tokens, 1) is None

    def test_a_fork_at_a_block_border_never_copies(self) -> None:
        shadow = new_shadow()
        sequence = computed(shadow, list(range(8)))
        child = shadow.fork(sequence, 8)
        child.append(1)
        assert shadow.memory.reserve(child.table, child.tokens, 1) is None

    def test_a_named_block_is_copied_before_it_is_written_even_by_its_only_holder(self) -> None:
        shadow = new_shadow()
        sequence = computed(shadow, list(range(8)))
        child = shadow.fork(sequence, 7)
        shadow.release(sequence)
        named = child.table.blocks[1]
        assert shadow.reserve(child, 1)
        assert child.table.blocks[1] != named
        shadow.finish_step()
        assert child.table.blocks[1] == named, "the same content: it took the named one back"
        shadow.verify_all()

    def test_eight_continuations_share_all_full_blocks_and_copy_only_the_tail(self) -> None:
        shadow = new_shadow(64)
        prompt = computed(shadow, list(range(21)))
        family = [prompt, *(shadow.fork(prompt, 20) for _ in range(7))]
        for index, sequence in enumerate(family):
            sequence.append(index)
            assert shadow.reserve(sequence, 1)
        shadow.finish_step()
        shadow.verify_all()
        assert len({tuple(sequence.table.blocks[:5]) for sequence in family}) == 1
        assert shadow.memory.stats().num_block_copies <= 8

    def test_a_sequence_cannot_be_forked_while_it_is_written(self) -> None:
        shadow = new_shadow()
        sequence = shadow.begin(SPACE, list(range(5)))
        shadow.reserve(sequence, 5)
        with raises_code(InvariantError, "cannot_fork_table"):
            shadow.memory.fork(sequence.table, 0)

    def test_a_fork_cannot_reach_beyond_what_is_computed(self) -> None:
        sequence = computed(new_shadow(), [1, 2])
        with raises_code(InvariantError, "table_not_open"):
            new_shadow().memory.fork(sequence.table, 1)
        shadow = new_shadow()
        with raises_code(InvariantError, "cannot_fork_table"):
            shadow.memory.fork(computed(shadow, [1, 2]).table, 3)


class TestShortage:
    def test_a_shortage_changes_nothing(self) -> None:
        shadow = new_shadow(2)
        sequence = shadow.begin(SPACE, list(range(12)))
        with pytest.raises(OutOfBlocksError) as refused:
            shadow.memory.reserve(sequence.table, sequence.tokens, 12)
        assert (refused.value.num_needed, refused.value.num_free) == (3, 2)
        assert shadow.reserve(sequence, 8)

    def test_the_least_recently_used_prefix_is_evicted_leaf_first(self) -> None:
        shadow = new_shadow(4)
        shadow.release(computed(shadow, [1] * 8))
        shadow.release(computed(shadow, [2] * 8))
        computed(shadow, [3] * 4)
        assert shadow.memory.divergence(SPACE, [1] * 9).num_cached_tokens == 4
        assert shadow.memory.divergence(SPACE, [2] * 9).num_cached_tokens == 8

    def test_a_hit_makes_a_prefix_recent(self) -> None:
        shadow = new_shadow(4)
        shadow.release(computed(shadow, [1] * 8))
        shadow.release(computed(shadow, [2] * 8))
        shadow.release(shadow.begin(SPACE, [1] * 9))
        computed(shadow, [3] * 8)
        assert shadow.memory.divergence(SPACE, [1] * 9).num_cached_tokens == 8
        assert shadow.memory.divergence(SPACE, [2] * 9).num_cached_tokens == 0

    def test_a_referenced_block_is_never_evicted(self) -> None:
        shadow = new_shadow(4)
        computed(shadow, [1] * 8)
        shadow.release(computed(shadow, [2] * 8))
        computed(shadow, [3] * 8)
        assert shadow.memory.divergence(SPACE, [1] * 9).num_cached_tokens == 8

    def test_evicting_on_demand_stops_when_nothing_is_cached(self) -> None:
        shadow = new_shadow(4)
        shadow.release(computed(shadow, [1] * 8))
        assert shadow.memory.evict(1) == 1
        assert shadow.memory.evict(5) == 1
        assert shadow.memory.evict(5) == 0
        assert shadow.memory.stats().num_evictions == 2
        shadow.verify_all()

    def test_a_preempted_sequence_finds_its_blocks_again(self) -> None:
        shadow = new_shadow(8)
        victim = computed(shadow, list(range(14)))
        shadow.release(victim)
        assert shadow.begin(SPACE, victim.tokens).table.num_computed == 12


class TestMisuse:
    def test_releasing_a_sequence_twice_does_nothing(self) -> None:
        shadow = new_shadow()
        table = computed(shadow, [1, 2]).table
        shadow.memory.release(table)
        shadow.memory.release(table)
        invariants.check_at_rest(shadow.memory)

    def test_a_released_table_cannot_be_used(self) -> None:
        memory = KVMemory(KVMemoryConfig(8, 4), BlockHasher(KEY))
        table = memory.open(SPACE)
        memory.release(table)
        for use in (
            lambda: memory.match(table, [1]),
            lambda: memory.reserve(table, [1], 1),
            lambda: memory.commit(table, 0),
            lambda: memory.fork(table, 0),
            lambda: memory.is_computing(table, [1]),
            lambda: memory.num_blocks_needed(table, 1),
        ):
            with raises_code(InvariantError, "table_not_open"):
                use()

    def test_another_memorys_table_is_refused(self) -> None:
        one, two = new_shadow(), new_shadow()
        table = computed(one, [1, 2]).table
        two.begin(SPACE, [1, 2])
        with raises_code(InvariantError, "table_not_open"):
            two.memory.release(table)

    def test_a_table_in_flight_cannot_be_released_or_reserved_again(self) -> None:
        shadow = new_shadow()
        sequence = shadow.begin(SPACE, list(range(5)))
        shadow.reserve(sequence, 2)
        with raises_code(InvariantError, "invariant_broken"):
            shadow.memory.release(sequence.table)
        with raises_code(InvariantError, "cannot_reserve_tokens"):
            shadow.memory.reserve(sequence.table, sequence.tokens, 1)

    @pytest.mark.parametrize("num_tokens", [0, -1, 6])
    def test_only_known_tokens_can_be_reserved(self, num_tokens: int) -> None:
        shadow = new_shadow()
        sequence = shadow.begin(SPACE, list(range(5)))
        with raises_code(InvariantError, "cannot_reserve_tokens"):
            shadow.memory.reserve(sequence.table, sequence.tokens, num_tokens)

    def test_drafts_stand_behind_the_last_known_token_only(self) -> None:
        shadow = new_shadow()
        sequence = shadow.begin(SPACE, list(range(5)))
        with raises_code(InvariantError, "cannot_reserve_tokens"):
            shadow.memory.reserve(sequence.table, sequence.tokens, 4, [1, 2])

    def test_no_more_is_committed_than_was_reserved(self) -> None:
        shadow = new_shadow()
        sequence = shadow.begin(SPACE, list(range(5)))
        with raises_code(InvariantError, "commit_beyond_reserved"):
            shadow.memory.commit(sequence.table, 0)
        shadow.reserve(sequence, 2)
        for num_tokens in (-1, 3):
            with raises_code(InvariantError, "commit_beyond_reserved"):
                shadow.memory.commit(sequence.table, num_tokens)

    def test_a_write_into_a_block_that_became_shared_is_noticed(self) -> None:
        shadow = new_shadow()
        sequence = shadow.begin(SPACE, list(range(5)))
        shadow.reserve(sequence, 5)
        shadow.memory.pool.retain(sequence.table.blocks[1])
        with raises_code(InvariantError, "shared_block_written"):
            shadow.memory.commit(sequence.table, 5)

    def test_a_write_into_a_named_block_is_noticed(self) -> None:
        shadow = new_shadow()
        sequence = shadow.begin(SPACE, list(range(5)))
        shadow.reserve(sequence, 5)
        shadow.memory.pool.name([sequence.table.blocks[0]])
        with raises_code(InvariantError, "shared_block_written"):
            shadow.memory.commit(sequence.table, 5)

    def test_tokens_out_of_range_change_nothing(self) -> None:
        memory = KVMemory(KVMemoryConfig(8, 4), BlockHasher(KEY))
        table = memory.open(SPACE)
        with pytest.raises(OverflowError):
            memory.reserve(table, [1, 2, 3, -4], 4)
        assert memory.pool.num_free == 8

    @pytest.mark.parametrize(
        ("setting", "value"),
        [
            ("num_blocks", 0),
            ("block_size", 0),
            ("block_size", 3),
            ("pin_share", 1.5),
            ("pin_share", -0.1),
            ("max_pin_s", 0.0),
            ("max_pin_s", float("nan")),
            ("max_pins", -1),
            ("num_evictions_remembered", 0),
        ],
    )
    def test_a_setting_that_breaks_a_rule_is_refused_with_its_value(self, setting: str, value: float) -> None:
        with raises_code(ConfigError, f"invalid_{setting}"):
            KVMemoryConfig(**{"num_blocks": 4, setting: value})  # type: ignore[arg-type]


class TestClear:
    def test_clearing_forgets_cached_blocks_and_leaves_sequences_alone(self) -> None:
        shadow = new_shadow(16)
        shadow.release(computed(shadow, [1] * 8))
        running = computed(shadow, [2] * 9)
        shadow.memory.clear()
        shadow.verify_all()
        for token in (1, 2):
            assert shadow.memory.divergence(SPACE, [token] * 9).num_cached_tokens == 0
        running.append(3)
        assert shadow.reserve(running, 1)
        shadow.finish_step()
        shadow.verify_all()

    def test_a_sequence_that_outlived_a_clear_names_nothing_below_unnamed_blocks(self) -> None:
        shadow = new_shadow(16)
        running = shadow.begin(SPACE, [2] * 12)
        assert shadow.reserve(running, 8)
        shadow.memory.clear()
        shadow.finish_step()
        assert shadow.reserve(running, 4)
        shadow.finish_step()
        assert shadow.memory.stats().num_named_blocks == 0
        shadow.verify_all()

    def test_a_fork_of_nothing_names_as_a_new_sequence_does(self) -> None:
        shadow = new_shadow(16)
        running = computed(shadow, [2] * 9)
        shadow.memory.clear()
        child = shadow.fork(running, 3)
        assert shadow.reserve(child, child.num_uncomputed)
        shadow.finish_step()
        assert shadow.memory.stats().num_named_blocks == 2
        grandchild = shadow.fork(running, 5)
        assert not grandchild.table.is_naming
        shadow.verify_all()

    def test_a_sequence_that_holds_nothing_yet_names_as_before(self) -> None:
        shadow = new_shadow(16)
        waiting = shadow.begin(SPACE, [2] * 9)
        shadow.memory.clear()
        assert shadow.reserve(waiting, 9)
        shadow.finish_step()
        assert shadow.memory.stats().num_named_blocks == 2


class TestEvents:
    def setup_method(self) -> None:
        self.events: list[KVEvent] = []
        self.memory = KVMemory(KVMemoryConfig(4, 4), BlockHasher(KEY), self.events.append)

    def compute(self, tokens: list[int]) -> None:
        table = self.memory.open(namespace(4, "tenant", "lora"))
        self.memory.match(table, tokens)
        self.memory.reserve(table, tokens, len(tokens) - table.num_computed)
        self.memory.commit(table, len(tokens) - table.num_computed)
        self.memory.release(table)

    def test_stored_blocks_carry_all_that_the_wire_needs(self) -> None:
        self.compute(list(range(9)))
        (event,) = self.events
        assert isinstance(event, BlockStored)
        assert len(event.digests) == 2
        assert event.parent_digest is None
        assert event.token_ids == tuple(range(8))
        assert (event.block_size, event.adapter, event.cache_group) == (4, "lora", "tenant")

    def test_a_longer_prompt_stores_only_what_is_new_under_its_parent(self) -> None:
        self.compute(list(range(5)))
        self.compute(list(range(9)))
        first, second = self.events
        assert isinstance(first, BlockStored)
        assert isinstance(second, BlockStored)
        assert second.parent_digest == first.digests[-1]
        assert second.token_ids == (4, 5, 6, 7)

    def test_removal_names_leaves_before_their_parents(self) -> None:
        self.compute([1] * 8)
        self.compute([2] * 16)
        stored, removed = self.events[0], self.events[1]
        assert isinstance(stored, BlockStored)
        assert isinstance(removed, BlockRemoved)
        assert removed.digests == stored.digests[::-1]

    def test_clearing_is_announced_once(self) -> None:
        self.memory.clear()
        assert self.events == [AllBlocksCleared()]

    def test_partial_blocks_and_evictions_of_nothing_are_not_announced(self) -> None:
        self.compute([1, 2, 3])
        self.memory.evict(3)
        assert self.events == []


class TestStatistics:
    def test_only_the_last_block_has_empty_slots(self) -> None:
        shadow = new_shadow(8)
        sequence = computed(shadow, list(range(5)))
        assert (len(sequence.table.blocks), sequence.table.num_computed) == (2, 5)
        assert shadow.memory.stats().usage == 0.25
        child = shadow.fork(sequence, 5)
        child.append(1)
        assert shadow.reserve(child, 1)
        assert shadow.memory.stats().num_open_tables == 2

    def test_a_sequence_that_asks_again_counts_no_second_time(self) -> None:
        shadow = new_shadow(8)
        shadow.release(computed(shadow, list(range(9))))
        before = shadow.memory.stats()
        again = shadow.memory.reopen(SPACE)
        assert shadow.memory.match(again, list(range(9))) == 8
        shadow.memory.reserve(again, list(range(9)), 1)
        after = shadow.memory.stats()
        assert (before.query_tokens, before.hit_tokens) == (after.query_tokens, after.hit_tokens)

    def test_at_rest_nothing_is_left_of_a_tenant_but_cached_blocks(self) -> None:
        shadow = new_shadow(8)
        shadow.release(computed(shadow, [1, 2, 3]))
        invariants.check_at_rest(shadow.memory)
        assert list(shadow.memory.tree.roots()) == []
        shadow.release(computed(shadow, [1, 2, 3, 4]))
        assert len(list(shadow.memory.tree.roots())) == 1

    def test_a_large_pool_gives_the_garbage_collector_nothing_to_walk(self) -> None:
        gc.collect()
        before = len(gc.get_objects())
        memory = KVMemory(KVMemoryConfig(100_000, 4), BlockHasher(KEY))
        for index in range(1000):
            table, tokens = memory.open(SPACE), [index] * 33
            memory.reserve(table, tokens, 33)
            memory.commit(table, 33)
            memory.release(table)
        gc.collect()
        assert memory.stats().num_named_blocks == 8000
        assert len(gc.get_objects()) - before < 200
