"""Tiles against a plain reading of block tables: which row stands where, and what it may see."""

from random import Random
from unittest.mock import patch

import numpy as np
from hypothesis import event, given
from hypothesis import strategies as st

from quire.backends.host.batch import Batch, make_batch
from quire.backends.mlx import tiles
from quire.backends.mlx.tiles import Tiles, make_tiles
from quire.core.request import ResolvedSampling
from quire.core.step import Sampling, WorkItem

Place = tuple[int, int]
"""A block and a slot in it."""


@st.composite
def items_of(draw: st.DrawFn, block_size: int) -> list[WorkItem]:
    """Sequences that go on after what they have, with chunks, drafts and more blocks than they need yet."""
    made: list[WorkItem] = []
    free = list(range(1, 400))
    Random(draw(st.integers(0, 99))).shuffle(free)
    for at in range(draw(st.integers(1, 9))):
        first = draw(st.one_of(st.integers(0, 12), st.integers(0, 70)))
        num_tokens = draw(st.one_of(st.just(1), st.integers(1, 20)))
        num_blocks = -(-(first + num_tokens) // block_size) + draw(st.integers(0, 2))
        if num_blocks > len(free):
            break
        blocks, free = free[:num_blocks], free[num_blocks:]
        num_drafts = draw(st.integers(0, num_tokens - 1))
        sampling = Sampling(ResolvedSampling(), 0, 0, first + num_tokens - num_drafts, 1, None)
        made.append(WorkItem(at, tuple(range(num_tokens)), first, tuple(blocks), sampling))
    return made


@st.composite
def batches(draw: st.DrawFn) -> tuple[Batch, int]:
    """A step's rows, and the size of its blocks."""
    block_size = draw(st.integers(1, 16))
    return make_batch(draw(items_of(block_size).filter(bool)), block_size), block_size


windows = st.one_of(st.none(), st.integers(1, 40))
limits = st.tuples(st.integers(1, 160), st.integers(1, 900))


def cut(batch: Batch, block_size: int, window: int | None, limit: tuple[int, int]) -> Tiles:
    """Tiles where a call may gather so many tokens and have so many scores."""
    with patch.multiple(tiles, CALL_TOKENS=limit[0], CALL_SCORES=limit[1]):
        return make_tiles(batch, block_size, window)


def seen_through(made: Tiles) -> dict[int, list[Place]]:
    """By row of the batch, every block and slot that its tile's table and mask let it see."""
    found: dict[int, list[Place]] = {}
    for tile in made.tiles:
        tables, mask, rows = np.array(tile.tables), np.array(tile.mask), np.array(tile.rows)
        num_sequences, num_heads, num_rows, num_tokens = mask.shape
        block_size = num_tokens // tables.shape[1]
        assert (num_sequences, num_heads) == (len(tables), 1)
        assert len(rows) == num_sequences * num_rows
        for at, row in enumerate(rows.tolist()):
            sequence = at // num_rows
            tokens = np.flatnonzero(mask[sequence, 0, at % num_rows]).tolist()
            found[row] = [(int(tables[sequence, token // block_size]), token % block_size) for token in tokens]
    return found


def seen_by_the_table(batch: Batch, block_size: int, window: int | None) -> dict[int, list[Place]]:
    """The same by the rule alone: a row sees itself and what is before it, as far as its window reaches."""
    found: dict[int, list[Place]] = {}
    for first_row, item in zip(batch.first_rows, batch.items, strict=True):
        for at in range(len(item.token_ids)):
            position = item.first_position + at
            first = 0 if window is None else max(0, position - window + 1)
            places = (divmod(one, block_size) for one in range(first, position + 1))
            found[first_row + at] = [(item.block_ids[number], slot) for number, slot in places]
    return found


@given(batches(), windows, limits)
def test_every_row_stands_in_one_tile_where_the_order_says(
    given_batch: tuple[Batch, int], window: int | None, limit: tuple[int, int]
) -> None:
    batch, block_size = given_batch
    made = cut(batch, block_size, window, limit)
    standing = np.concatenate([np.array(tile.rows) for tile in made.tiles])
    assert sorted(standing.tolist()) == list(range(len(batch.tokens)))
    assert standing[np.array(made.order)].tolist() == list(range(len(batch.tokens)))


@given(batches(), windows, limits)
def test_a_row_sees_itself_and_what_is_before_it_and_nothing_else(
    given_batch: tuple[Batch, int], window: int | None, limit: tuple[int, int]
) -> None:
    batch, block_size = given_batch
    seen = seen_through(cut(batch, block_size, window, limit))
    assert seen == seen_by_the_table(batch, block_size, window)
    assert all(block for places in seen.values() for block, _ in places), "the null block is seen"


@given(batches(), windows, limits)
def test_a_call_gathers_no_more_than_it_may_unless_one_sequence_has_more(
    given_batch: tuple[Batch, int], window: int | None, limit: tuple[int, int]
) -> None:
    batch, block_size = given_batch
    for tile in cut(batch, block_size, window, limit).tiles:
        num_sequences, _, num_rows, num_tokens = tile.mask.shape
        assert num_sequences == 1 or num_sequences * num_tokens <= limit[0]
        assert num_sequences * num_rows == 1 or num_sequences * num_rows * num_tokens <= limit[1]
        event("several sequences" if num_sequences > 1 else "one sequence")


@given(batches(), windows, limits)
def test_tables_hold_what_is_seen_and_padding_at_most_doubles_them(
    given_batch: tuple[Batch, int], window: int | None, limit: tuple[int, int]
) -> None:
    batch, block_size = given_batch
    made = cut(batch, block_size, window, limit)
    seen = seen_through(made)
    for tile in made.tiles:
        num_rows = tile.mask.shape[2]
        for sequence, table in enumerate(np.array(tile.tables).tolist()):
            rows = np.array(tile.rows)[sequence * num_rows : (sequence + 1) * num_rows].tolist()
            held = [block for block in table if block]
            assert set(held) == {block for row in rows for block, _ in seen[row]}
            assert len(held) == len(set(held))
            assert table == held + [0] * (len(table) - len(held))
            assert len(table) <= 2 * len(held)


def test_many_sequences_of_about_the_same_length_are_one_call() -> None:
    """Neither the longest chunk nor a stranger of another length makes them more."""
    decoding = [WorkItem(at, (7,), 64 + 3 * at, tuple(range(1 + 20 * at, 21 + 20 * at))) for at in range(16)]
    others = [WorkItem(50, (7,) * 9, 64, tuple(range(400, 420))), WorkItem(51, (7,), 3, (421,))]
    made = make_tiles(make_batch([*decoding, *others], 8), 8, None)
    assert [tile.mask.shape[0] for tile in made.tiles] == [16, 1, 1]
