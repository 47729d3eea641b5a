"""Guesses from what was said before: the latest of the longest runs, own tokens first, and nobody else's group."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.core.digests import BlockHasher, Namespace
from quire.core.memory.kv_config import KVMemoryConfig
from quire.core.memory.kv_memory import KVMemory
from quire.core.request import Request
from quire.core.scheduling import ngrams
from quire.core.scheduling.acceptance_rates import Draft
from quire.core.scheduling.ngrams import MAX_NGRAM, OTHER_REQUEST, Ngrams, make_scheduler
from quire.core.scheduling.scheduler_config import SchedulerConfig
from quire.core.scheduling.sequence import Sequence

GROUP = Namespace(1, "model", "", "slots", 4, "group")


def sequence(*tokens: int, num_prompt: int | None = None, group: str = "group") -> Sequence:
    count = len(tokens) if num_prompt is None else num_prompt
    request = Request("r", tokens[:count], replace(GROUP, cache_group=group), 0.0)
    return Sequence(1, request, (0.0, 1), produced=tokens[count:])


def guessed(drafts: Ngrams, one: Sequence, limit: int) -> tuple[int, ...]:
    return drafts.propose(one, limit).token_ids


@pytest.mark.parametrize(
    ("tokens", "limit", "guess"),
    [
        ((1, 2, 3, 4, 5, 1, 2), 3, (3, 4, 5)),
        ((1, 2, 3, 4, 5, 1, 2), 2, (3, 4)),
        ((7, 1, 2, 8, 9, 1, 2, 3, 7, 1, 2), 1, (8,)),  # three tokens stood there, two later
        ((1, 2, 8, 1, 2, 9, 1, 2), 1, (9,)),  # the latest
        ((5, 6, 5, 6), 5, (5, 6, 5, 6, 5)),  # who repeats himself goes on
        ((3, 3, 3), 4, (3, 3, 3, 3)),
        ((1, 2, 3, 4), 4, ()),
        ((1,), 4, ()),
        ((256, 1, 9, 65536, 256), 2, (1, 9)),  # one token is a run too
    ],
)
def test_what_followed_the_last_tokens_before_is_guessed(
    tokens: tuple[int, ...], limit: int, guess: tuple[int, ...]
) -> None:
    assert guessed(Ngrams(), sequence(*tokens), limit) == guess


def test_bytes_across_a_border_between_tokens_are_no_run() -> None:
    # 01 02 03 00 │ 00 05 06 00 │ 00 09 09 00 holds the bytes of 02 03 00 00 │ 05 06 00 00 from its second byte on.
    assert guessed(Ngrams(), sequence(0x030201, 0x060500, 0x090900, 0x0302, 0x0605), 2) == ()


def plainly(tokens: list[int], limit: int) -> tuple[int, ...]:
    for length in range(min(MAX_NGRAM, len(tokens)), 0, -1):
        run = tokens[-length:]
        for at in range(len(tokens) - len(run) - 1, -1, -1):
            if tokens[at : at + len(run)] == run:
                tail = tokens[at + len(run) :]
                return tuple((tail * limit)[:limit])
    return ()


@given(st.lists(st.sampled_from([0, 1, 256, 65537]), min_size=1, max_size=40), st.integers(1, 9))
def test_guesses_are_those_of_a_plain_search(tokens: list[int], limit: int) -> None:
    assert guessed(Ngrams(), sequence(*tokens), limit) == plainly(tokens, limit)


def test_tokens_that_come_later_are_searched_too() -> None:
    drafts, one = Ngrams(), sequence(1, 2, 3)
    assert guessed(drafts, one, 2) == ()
    one.tokens += [9, 1, 2]
    assert guessed(drafts, one, 2) == (3, 9)


def test_what_others_of_the_group_have_said_is_guessed() -> None:
    drafts = Ngrams()
    drafts.store_output(sequence(1, 2, 3, 4, 5, num_prompt=2))
    assert guessed(drafts, sequence(9, 3, 4), 4) == (5,)
    assert guessed(drafts, sequence(1, 2), 2) == (3, 4)


def test_an_own_run_comes_before_anothers_of_the_same_length() -> None:
    drafts = Ngrams()
    drafts.store_output(sequence(1, 2, 3, num_prompt=1))
    assert guessed(drafts, sequence(1, 2, 7, 1, 2), 1) == (7,)


def test_one_answers_end_and_the_next_ones_beginning_are_no_run() -> None:
    drafts = Ngrams()
    drafts.store_output(sequence(8, 1, num_prompt=1))
    drafts.store_output(sequence(2, 3, num_prompt=1))
    assert drafts.propose(sequence(1, 2), 4) == Draft((3,), OTHER_REQUEST + 1)
    assert guessed(drafts, sequence(8, 1), 4) == ()


def test_a_guess_says_how_long_its_run_was_and_whose() -> None:
    drafts = Ngrams()
    drafts.store_output(sequence(7, 8, 9, num_prompt=1))
    assert drafts.propose(sequence(1, 2, 3, 1, 2), 1).source == 2
    assert drafts.propose(sequence(1, 3, 1), 1).source == 1
    assert drafts.propose(sequence(1, 7, 8), 1).source == OTHER_REQUEST + 2


def test_nothing_is_taken_from_another_group() -> None:
    drafts = Ngrams()
    drafts.store_output(sequence(1, 2, 3, 4, num_prompt=1))
    assert guessed(drafts, sequence(2, 3, group="other"), 4) == ()
    assert guessed(drafts, sequence(2, 3), 4) == (4,)


def test_who_said_nothing_leaves_nothing() -> None:
    drafts = Ngrams()
    drafts.store_output(sequence(1, 2, 3, 4))
    assert guessed(drafts, sequence(1, 2), 4) == ()


def test_old_answers_and_groups_make_room_for_new_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ngrams, "OUTPUT_BYTES", 20)
    monkeypatch.setattr(ngrams, "MAX_NAMESPACES", 2)
    drafts = Ngrams()
    for token in (10, 20, 30):
        drafts.store_output(sequence(1, token, token + 1, token + 2, num_prompt=1))
    assert guessed(drafts, sequence(10, 11), 1) == ()
    assert guessed(drafts, sequence(30, 31), 1) == (32,)
    for group in ("b", "c"):
        drafts.store_output(sequence(1, 2, 3, num_prompt=1, group=group))
    assert guessed(drafts, sequence(30, 31), 1) == ()
    assert guessed(drafts, sequence(1, 2, group="c"), 1) == (3,)


@pytest.mark.parametrize(
    ("guesses", "num_slots", "has_guesses"), [(True, 0, True), (False, 0, False), (True, 9, False)]
)
def test_a_scheduler_guesses_if_that_is_wanted_and_guesses_can_be_taken_back(
    guesses: bool, num_slots: int, has_guesses: bool
) -> None:
    memory = KVMemory(KVMemoryConfig(8, 4, num_slots=num_slots, num_running_slots=num_slots), BlockHasher(bytes(32)))
    scheduler = make_scheduler(SchedulerConfig(max_step_tokens=64, max_running=8), memory, has_drafts=guesses)
    assert (scheduler.propose is not None) == has_guesses
