"""Attention over more than one segment of 1,024 positions: right, and a row's bits are its own, whoever takes which
segment. Heads are small and few, so that more threads than KV heads have something to share."""

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.backends.kernels import extension
from quire.backends.kernels.threads import num_threads, use_threads
from tests.support.changed import changed
from tests.support.core.attention_world import NAN, World, close

pytestmark = pytest.mark.skipif(not extension.availability().is_available, reason=extension.availability().reason)

SEGMENT = 1_024
THREADS = (1, 2, 3, 8, 32)


@pytest.fixture(autouse=True)
def threads_are_put_back() -> Iterator[None]:
    before = num_threads()
    yield
    use_threads(before)


def world_of(block_size: int, window: int | None, dtype: torch.dtype, seed: int = 0) -> World:
    return World(3, 1, 32, 40, block_size, window=window, dtype=dtype, num_blocks=10 * SEGMENT // block_size, seed=seed)


def alone(world: World, num_thread: int) -> torch.Tensor:
    use_threads(num_thread)
    return torch.cat([world.run([item], [rows]) for item, rows in zip(world.items, world.queries, strict=True)])


def together(world: World, num_thread: int) -> torch.Tensor:
    use_threads(num_thread)
    return world.run_all()


@given(
    st.lists(st.tuples(st.integers(0, 3 * SEGMENT), st.sampled_from([1, 1, 1, 2, 9])), min_size=1, max_size=3),
    st.sampled_from([16, 32, 64]),
    st.sampled_from([None, 1, 700, SEGMENT, 1_500]),
    st.sampled_from([torch.float32, torch.bfloat16, torch.int8]),
)
@settings(max_examples=25, deadline=None)
def test_a_row_has_the_same_bits_with_any_threads_and_in_any_company(
    rows: list[tuple[int, int]], block_size: int, window: int | None, dtype: torch.dtype
) -> None:
    world = world_of(block_size, window, dtype)
    for past, count in rows:
        world.add(past, count)
    expected = alone(world, 1)
    assert close(expected, world.reference())
    for num_thread in THREADS:
        assert torch.equal(together(world, num_thread), expected)
        assert torch.equal(alone(world, num_thread), expected)


@pytest.mark.parametrize("window", [None, 1_200])
@pytest.mark.parametrize("num_shared", [10, SEGMENT // 16 + 7, 2 * SEGMENT // 16])
def test_a_shared_prefix_of_any_length_changes_no_bits(num_shared: int, window: int | None) -> None:
    world = world_of(16, window, torch.float32)
    trunk = [world.free.pop() for _ in range(num_shared)]
    world.write(trunk, 0, num_shared * 16)
    for at in range(5):
        world.add(num_shared * 16 + (0, 1, 40, 1_100, 1_101)[at], 1, shared=trunk)
    expected = alone(world, 1)
    assert close(expected, world.reference())
    for num_thread in THREADS:
        assert torch.equal(together(world, num_thread), expected)


@pytest.mark.parametrize("position", [SEGMENT - 1, SEGMENT, 2 * SEGMENT - 1, 2 * SEGMENT])
def test_rows_at_a_border_are_right_and_the_same_in_a_chunk(position: int) -> None:
    world = world_of(32, None, torch.float32)
    item, queries = world.add(position - 3, 7), world.queries[0]
    whole = together(world, 2)
    assert close(whole, world.reference())
    parts = [
        world.run([changed(item, token_ids=(0,), first_position=position - 3 + at)], [queries[at : at + 1]])
        for at in range(7)
    ]
    assert torch.equal(torch.cat(parts), whole)


def test_a_nan_in_a_later_segment_stays_in_its_own_row() -> None:
    world = world_of(16, None, torch.float32)
    for past in (2_500, 2_500, 30):
        world.add(past, 1)
    clean = together(world, 8)
    world.keys[world.items[0].block_ids[SEGMENT // 16 + 1], 0, 3, 5] = NAN
    out = together(world, 8)
    assert torch.isnan(out[0]).all()
    assert torch.equal(out[1:], clean[1:])


def test_segments_with_far_apart_peaks_are_weighed_against_each_other() -> None:
    world = world_of(16, None, torch.float32)
    item = world.add(2 * SEGMENT + 100, 1)
    middle = list(item.block_ids[SEGMENT // 16 : 2 * SEGMENT // 16])
    for factor in (0.0, 30.0):
        world.keys[middle] *= factor
        assert close(together(world, 3), world.reference())
        world.keys[middle] = torch.randn(world.keys[middle].shape, generator=world.generator)
