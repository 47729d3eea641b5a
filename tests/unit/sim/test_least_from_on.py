"""The least candidate from which on all larger ones tried are good enough."""

from hypothesis import given
from hypothesis import strategies as st

from quire.sim.planning.planning import MinIndex, smallest_good


def search(good: list[bool], num_above: int = 0, firsts: tuple[int, ...] = ()) -> MinIndex:
    return smallest_good(len(good), good.__getitem__, num_above, firsts)


def exhaustive(good: list[bool]) -> int | None:
    bad = [place for place, is_good in enumerate(good) if not is_good]
    answer = bad[-1] + 1 if bad else 0
    return answer if answer < len(good) else None


@given(st.integers(0, 40), st.integers(1, 40), st.integers(0, 6))
def test_where_more_is_always_better_it_is_the_first_and_few_are_tried(first: int, num: int, num_above: int) -> None:
    found = search([place >= first for place in range(num)], num_above)
    assert found.index == (first if first < num else None)
    assert found.is_monotone
    assert len(found.tried) <= 2 + num.bit_length() + num_above


@given(st.lists(st.booleans(), min_size=1, max_size=24))
def test_whoever_looks_at_all_above_finds_what_exhaustive_search_finds(good: list[bool]) -> None:
    found = search(good, num_above=len(good))
    assert found.index == exhaustive(good)


@given(st.lists(st.booleans(), min_size=1, max_size=24), st.integers(0, 5))
def test_all_that_were_tried_from_the_answer_on_are_good_and_the_one_below_is_not(good: list[bool], above: int) -> None:
    found = search(good, above)
    tried = dict(found.tried)
    assert all(tried[place] == good[place] for place in tried)
    if found.index is None:
        assert not tried[max(tried)]
        return
    assert all(is_good for place, is_good in tried.items() if place >= found.index)
    assert found.index == 0 or tried[found.index - 1] is False
    assert all(place in tried for place in range(found.index, min(found.index + 1 + above, len(good))))


def test_an_exception_above_the_answer_moves_it_up_and_is_told() -> None:
    good = [False, False, True, True, False, True, True, True]
    assert search(good, num_above=2).index == 5
    assert not search(good, num_above=2).is_monotone


def test_firsts_are_tried_in_turn_so_that_the_largest_need_not_be_run() -> None:
    good = [place >= 4 for place in range(64)]
    found = search(good, num_above=1, firsts=(0, 1, 3, 7, 15, 31, 63))
    assert found.index == 4
    assert max(place for place, _ in found.tried) == 7
    assert search([False] * 5, firsts=(0, 1, 3, 4)).index is None
