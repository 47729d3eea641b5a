"""Slots of recurrent state: copies in the order given, a slot 0 that nobody writes to, and one slot for each item."""

import numpy as np
import pytest

from quire.backends.cpu.state_store import StateStore, no_runs
from quire.backends.host.batch import Batch, make_batch
from quire.core.step import SlotCopy, WorkItem
from quire.errors import InvariantError
from tests.support.errors import raises_code

SIZE = 21


def numbered(num_slots: int) -> StateStore:
    """Every slot but the first holds its own number."""
    store = StateStore(SIZE, num_slots)
    store.numbers[1:] = np.arange(1, num_slots + 1)[:, None]
    return store


def held(store: StateStore) -> list[float]:
    """What each slot holds, of one number all over."""
    assert (store.numbers == store.numbers[:, :1]).all()
    return [float(one) for one in store.numbers[:, 0]]


def batch_of(*items: tuple[int, int]) -> Batch:
    """Items of so many tokens in such a slot."""
    return make_batch(
        [WorkItem(at, (3,) * count, 0, (1, 2), state_slot=slot) for at, (count, slot) in enumerate(items)], 16
    )


def test_a_store_begins_with_zeros_and_a_slot_takes_four_bytes_a_number() -> None:
    store = StateStore(SIZE, 3)
    assert store.numbers.shape == (4, SIZE)
    assert not store.numbers.any()
    assert store.numbers[1].nbytes == 4 * SIZE
    assert store.numbers.ctypes.data % 64 == 0


def test_copies_are_made_in_order_so_that_one_may_read_what_another_wrote() -> None:
    store = numbered(4)
    store.copy([SlotCopy(1, 2), SlotCopy(2, 3), SlotCopy(4, 1)])
    assert held(store) == [0, 4, 1, 1, 4]


def test_a_copy_from_slot_0_is_the_state_before_the_first_token() -> None:
    store = numbered(2)
    store.copy([SlotCopy(0, 2)])
    assert held(store) == [0, 1, 0]


@pytest.mark.parametrize("copy", [SlotCopy(1, 0), SlotCopy(0, 0), SlotCopy(3, 1), SlotCopy(1, 3), SlotCopy(-1, 1)])
def test_a_copy_to_slot_0_or_out_of_range_is_refused(copy: SlotCopy) -> None:
    store = numbered(2)
    with raises_code(InvariantError, "invariant_broken"):
        store.copy([copy])
    assert held(store) == [0, 1, 2]


def test_a_run_is_an_items_rows_and_its_slot() -> None:
    runs = StateStore(SIZE, 5).runs(batch_of((3, 4), (1, 1), (5, 5)))
    assert runs.rows.tolist() == [0, 3, 4, 9]
    assert runs.slots.tolist() == [4, 1, 5]


def test_a_step_without_items_has_no_runs() -> None:
    runs = StateStore(SIZE, 5).runs(batch_of())
    assert (runs.rows.tolist(), runs.slots.tolist()) == ([0], [])
    assert (no_runs().rows.tolist(), no_runs().slots.tolist()) == ([0], [])


@pytest.mark.parametrize("slots", [(1, 1), (2, 0), (3, 1), (-1, 2)])
def test_items_that_share_a_slot_or_have_none_are_refused(slots: tuple[int, int]) -> None:
    with raises_code(InvariantError, "invariant_broken"):
        StateStore(SIZE, 2).runs(batch_of(*((1, slot) for slot in slots)))
