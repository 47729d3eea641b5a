"""At which borders a state is kept, and where a run of tokens ends for that. Blocks of four tokens."""

import pytest

from quire.core.memory.block_table import BlockTable
from quire.core.memory.state_slots import StateCheckpoint
from quire.core.request import Request
from quire.core.scheduling.sequence import Sequence
from quire.core.scheduling.state_checkpoints import NUM_BLOCKS_TO_FIRST_SPARSE, checkpoint_after, tokens_to_border
from tests.support.core.shadow import namespace

FIRST_SPARSE = 4 * NUM_BLOCKS_TO_FIRST_SPARSE


def sequence(num_prompt: int, num_computed: int = 0, num_matched: int = 0, num_produced: int = 0) -> Sequence:
    """One that has computed so many tokens, and found so many blocks when it last asked."""
    request = Request("r", tuple(range(num_prompt)), namespace(4), 0.0)
    one = Sequence(1, request, (0.0, 1), produced=tuple(range(num_produced)))
    one.table = BlockTable(1, -1, 4)
    one.table.num_computed = one.table.num_reserved = num_computed
    one.table.num_matched = num_matched
    return one


class TestRuns:
    @pytest.mark.parametrize(("num_prompt", "border"), [(5, 4), (8, 4), (9, 8), (12, 8), (63, 60)])
    def test_a_prompt_is_run_to_its_last_full_block_that_can_be_hit(self, num_prompt: int, border: int) -> None:
        assert tokens_to_border(sequence(num_prompt), num_prompt) == border

    @pytest.mark.parametrize("num_prompt", [1, 3, 4])
    def test_a_prompt_without_such_a_block_is_run_whole(self, num_prompt: int) -> None:
        assert tokens_to_border(sequence(num_prompt), num_prompt) == num_prompt

    def test_what_follows_the_last_border_is_run_whole(self) -> None:
        assert tokens_to_border(sequence(11, num_computed=8), 3) == 3

    def test_a_run_ends_where_blocks_matched_and_their_state_was_missing(self) -> None:
        assert tokens_to_border(sequence(40, num_matched=3), 40) == 12
        assert tokens_to_border(sequence(40, num_computed=8, num_matched=3), 32) == 4
        assert tokens_to_border(sequence(40, num_computed=12, num_matched=3), 28) == 24, "it has come that far"

    def test_a_run_ends_on_the_first_border_that_is_worth_it(self) -> None:
        long = 5 * FIRST_SPARSE
        assert tokens_to_border(sequence(long, num_matched=3), long) == 12
        assert tokens_to_border(sequence(long, num_matched=20), long) == FIRST_SPARSE
        assert tokens_to_border(sequence(70, num_computed=FIRST_SPARSE), 6) == 4

    def test_sparse_borders_lie_at_doubling_distances(self) -> None:
        one, ends = sequence(9 * FIRST_SPARSE), []
        assert one.table is not None
        while one.num_uncomputed > 4:
            one.table.num_computed += tokens_to_border(one, one.num_uncomputed)
            ends.append(one.table.num_computed / FIRST_SPARSE)
        assert ends == [1, 2, 4, 8, 9 - 4 / FIRST_SPARSE]

    @pytest.mark.parametrize("num_tokens", [0, 1, 7, 8])
    def test_a_run_that_reaches_no_such_border_is_as_long_as_it_was(self, num_tokens: int) -> None:
        assert tokens_to_border(sequence(40, num_matched=2), num_tokens) == num_tokens

    def test_a_resumed_answer_is_run_to_the_end_of_its_prompt_and_then_to_its_own_last_full_block(self) -> None:
        assert tokens_to_border(sequence(10, num_produced=13), 23) == 8
        assert tokens_to_border(sequence(10, num_computed=8, num_produced=13), 15) == 12


class TestKeeps:
    @pytest.mark.parametrize("num_tokens", [1, 2, 3, 5, 63])
    def test_nothing_is_kept_beside_a_border(self, num_tokens: int) -> None:
        assert checkpoint_after(sequence(100), num_tokens) is None

    def test_a_border_is_a_place_and_not_a_length(self) -> None:
        assert checkpoint_after(sequence(100, num_computed=3), 4) is None
        assert checkpoint_after(sequence(100, num_computed=3), 1) is StateCheckpoint.TRANSIENT

    def test_the_last_full_block_of_a_prompt_lasts(self) -> None:
        assert checkpoint_after(sequence(9), 8) is StateCheckpoint.DURABLE
        assert checkpoint_after(sequence(8), 4) is StateCheckpoint.DURABLE
        assert checkpoint_after(sequence(8), 8) is StateCheckpoint.TRANSIENT, (
            "nobody with the same prompt can go on from there"
        )

    def test_it_does_so_for_whoever_comes_by_with_an_answer(self) -> None:
        assert checkpoint_after(sequence(9, num_produced=20), 8) is StateCheckpoint.DURABLE

    def test_the_place_where_prompts_part_lasts(self) -> None:
        assert checkpoint_after(sequence(100, num_matched=3), 12) is StateCheckpoint.DURABLE
        assert checkpoint_after(sequence(100, num_matched=4), 12) is StateCheckpoint.TRANSIENT

    def test_borders_at_doubling_distances_are_sparse(self) -> None:
        kinds = {at: checkpoint_after(sequence(1000), at * FIRST_SPARSE) for at in range(1, 9)}
        assert [at for at, kind in kinds.items() if kind is StateCheckpoint.SPARSE] == [1, 2, 4, 8]
        assert {kinds[at] for at in (3, 5, 6, 7)} == {StateCheckpoint.TRANSIENT}

    def test_a_sparse_border_that_is_worth_more_lasts(self) -> None:
        assert checkpoint_after(sequence(FIRST_SPARSE + 1), FIRST_SPARSE) is StateCheckpoint.DURABLE

    def test_the_newest_border_of_an_answer_is_kept_in_passing(self) -> None:
        assert checkpoint_after(sequence(6, num_computed=11, num_produced=6), 1) is StateCheckpoint.TRANSIENT
