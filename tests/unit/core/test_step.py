"""What an item says it wants, position by position."""

import pytest

from quire.core.request import ResolvedSampling
from quire.core.step import Sampling, WorkItem
from tests.support.changed import changed


def item(num_known: int, drafts: tuple[int, ...], known: tuple[int, ...] | None = None) -> WorkItem:
    """Feeds positions 4 and on of a sequence, of which `num_known` are known."""
    sampling = Sampling(ResolvedSampling(), 7, 0, 4 + num_known, 2, known)
    return WorkItem(1, (0,) * num_known + drafts, 4, (1, 2, 3), sampling)


def test_without_drafts_one_token_is_chosen_after_the_last_one_fed() -> None:
    one = item(3, ())
    assert (one.num_drafts, one.drafts, one.samplings()) == (0, (), (one.sampling,))


def test_an_item_that_samples_nothing_has_neither_drafts_nor_choices() -> None:
    one = changed(item(3, ()), sampling=None)
    assert (one.num_drafts, one.drafts, one.samplings()) == (0, (), ())
    assert one.num_true_tokens(0) == 3


def test_what_is_fed_from_the_first_choice_on_are_drafts() -> None:
    one = item(2, (8, 9))
    assert (one.num_drafts, one.drafts) == (2, (8, 9))
    assert [sampling.position for sampling in one.samplings()] == [6, 7, 8]
    assert [sampling.num_output_tokens for sampling in one.samplings()] == [4, 5, 6]
    assert {sampling.known_tokens for sampling in one.samplings()} == {None}


def test_penalties_see_the_drafts_before_each_choice() -> None:
    known = (1, 2, 3, 4, 0, 0)
    assert [one.known_tokens for one in item(2, (8, 9), known).samplings()] == [known, (*known, 8), (*known, 8, 9)]


@pytest.mark.parametrize(("num_taken", "expected"), [(1, 2), (2, 3), (3, 4)])
def test_of_the_tokens_fed_those_known_and_the_drafts_before_the_last_token_taken_are_true(
    num_taken: int, expected: int
) -> None:
    assert item(2, (8, 9)).num_true_tokens(num_taken) == expected
