"""Where two prompts differ and go on alike."""

from hypothesis import given
from hypothesis import strategies as st

from quire.client.prefix import prompt_alignment
from quire.client.prefix.prompt_alignment import MAX_GAPS, MIN_RUN, gaps_between, num_common, packed

TOKENS = st.lists(st.integers(0, 3), max_size=400)


def plain_common(one: list[int], other: list[int]) -> int:
    return next(
        (at for at, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), min(len(one), len(other))
    )


@given(TOKENS, TOKENS, st.integers(0, 300))
def test_what_two_prompts_have_in_common_is_counted_exactly(one: list[int], other: list[int], num_shared: int) -> None:
    shared = [7] * num_shared
    assert num_common(packed(shared + one), packed(shared + other)) == num_shared + plain_common(one, other)
    assert num_common(packed([9, *one]), packed(one), 1, 0) == len(one)


@given(TOKENS, TOKENS)
def test_gaps_and_runs_follow_one_another_and_runs_are_the_same_on_both_sides(one: list[int], other: list[int]) -> None:
    start = plain_common(one, other)
    at, there = start, start
    gaps = gaps_between(packed(one), packed(other), start)
    assert len(gaps) <= MAX_GAPS
    for gap in gaps:
        assert (gap.start, gap.other_start) == (at, there)
        assert gap.stop >= gap.start
        assert gap.other_stop >= gap.other_start
        at, there = gap.stop + gap.num_alike, gap.other_stop + gap.num_alike
        assert one[gap.stop : at] == other[gap.other_stop : there]
        is_end = gap.stop == len(one) or gap.other_stop == len(other)
        assert gap.num_alike >= MIN_RUN or is_end
        if gap.num_alike and gap.stop > gap.start and gap.other_stop > gap.other_start:
            assert one[gap.stop - 1] != other[gap.other_stop - 1], "a run begins as early as it can"


@given(st.integers(1, 3000), st.integers(0, 50), st.integers(0, 50))
def test_a_gap_is_as_long_as_what_was_put_in_on_either_side(num_behind: int, num_ours: int, num_theirs: int) -> None:
    before, behind = list(range(100)), list(range(1000, 1000 + num_behind + MIN_RUN))
    ours = before + [500] * num_ours + behind
    theirs = before + [600] * num_theirs + behind
    (gap, *more) = gaps_between(packed(ours), packed(theirs), 100) if num_ours or num_theirs else [None]
    assert not more
    if gap is not None:
        assert (gap.stop - gap.start, gap.other_stop - gap.other_start) == (num_ours, num_theirs)
        assert gap.num_alike == len(behind)


@given(st.lists(st.integers(0, 1), min_size=1, max_size=400), st.integers(0, 60), st.integers(0, 60))
def test_a_run_is_followed_back_to_where_it_begins(shared: list[int], num_ours: int, num_theirs: int) -> None:
    ours, theirs = [7] * num_ours + shared, [8] * num_theirs + shared
    place = num_ours + len(shared) - 1, num_theirs + len(shared) - 1
    found = prompt_alignment._move_back(packed(ours), packed(theirs), place, (0, 0))
    assert found == (num_ours, num_theirs)
    least = num_ours + len(shared) // 2, 0
    found = prompt_alignment._move_back(packed(ours), packed(theirs), place, least)
    assert found == (least[0], num_theirs + len(shared) // 2)


def test_a_prompt_that_goes_on_where_another_ends_has_no_gap() -> None:
    assert gaps_between(packed(range(50)), packed(range(90)), 50) == []
