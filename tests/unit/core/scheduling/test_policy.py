"""The pure choices."""

import pytest

from quire.core.request import Continuation, FinishReason, PriorityClass, Request, ResolvedSampling
from quire.core.scheduling.policy import blocks_to_finish_alone, chunk_length, may_preempt, victims_for
from quire.core.scheduling.rows import token_acceptance
from quire.core.scheduling.sequence import Sequence
from tests.support.core.shadow import namespace

HIGH, NORMAL, LOW = PriorityClass.HIGH, PriorityClass.NORMAL, PriorityClass.LOW


def sequence(number: int, priority: PriorityClass = LOW, key: float = 0.0, num_siblings: int = 0) -> Sequence:
    request = Request(f"r{number}", (1, 2), namespace(4), 0.0, priority=priority)
    made = Sequence(number, request, (key, number))
    made.siblings = [Sequence(100 + at, request, (key, 100 + at), at + 1) for at in range(num_siblings)]
    return made


@pytest.mark.parametrize(
    ("computed", "known", "budget", "fork_point", "expected"),
    [
        (0, 10, 64, None, 10),  # all that is known
        (0, 10, 7, None, 4),  # cut at a border
        (2, 10, 7, None, 6),  # the border counts from the start of the sequence
        (2, 10, 1, None, 0),  # the budget does not reach the next border
        (9, 10, 1, None, 1),  # a single token
        (0, 10, 64, 9, 9),  # the fork point
        (9, 10, 64, 9, 1),  # beyond it
        (0, 10, 0, None, 0),
    ],
)
def test_a_chunk_ends_on_a_border_at_the_last_token_or_at_the_fork(
    computed: int, known: int, budget: int, fork_point: int | None, expected: int
) -> None:
    assert chunk_length(computed, known, budget, 4, fork_point) == expected


@pytest.mark.parametrize(
    ("newcomer", "victim", "allowed"),
    [
        ((HIGH, 0.0), (LOW, 1.0), True),
        ((NORMAL, 0.0), (LOW, 1.0), True),
        ((HIGH, 1.0), (LOW, 0.0), False),  # a later key
        ((HIGH, 0.0), (HIGH, 1.0), False),  # the same class
        ((LOW, 0.0), (HIGH, 1.0), False),  # a higher class
    ],
)
def test_a_newcomer_displaces_a_lower_class_with_a_later_key(
    newcomer: tuple[PriorityClass, float], victim: tuple[PriorityClass, float], allowed: bool
) -> None:
    assert may_preempt(sequence(1, *newcomer), sequence(2, *victim)) is allowed


def test_after_three_preemptions_a_sequence_is_protected_from_newcomers() -> None:
    victim = sequence(2, LOW, 1.0)
    victim.num_preemptions = 2
    assert may_preempt(sequence(1, HIGH), victim)
    victim.num_preemptions = 3
    assert not may_preempt(sequence(1, HIGH), victim)


def test_the_latest_key_yields_first_and_no_more_yield_than_needed() -> None:
    running = [sequence(number, LOW, float(number)) for number in (2, 3, 4)]
    assert victims_for(sequence(1, HIGH), running, lambda gone: len(gone) >= 1) == [running[2]]
    assert victims_for(sequence(1, HIGH), running, lambda gone: len(gone) >= 2) == [running[2], running[1]]
    assert victims_for(sequence(1, HIGH), running, lambda gone: True) == []


def test_who_turns_out_not_to_be_needed_is_spared() -> None:
    running = [sequence(number, LOW, float(number)) for number in (2, 3, 4)]
    assert victims_for(sequence(1, HIGH), running, lambda gone: running[1] in gone) == [running[1]]


def test_nobody_yields_if_that_is_not_enough() -> None:
    running = [sequence(2, LOW, 2.0), sequence(3, HIGH, 3.0)]
    assert victims_for(sequence(1, HIGH), running, lambda gone: len(gone) >= 2) is None


@pytest.mark.parametrize(
    ("produced", "expected"),
    [
        ((), None),
        ((9,), None),  # a stop token, but too early
        ((5, 9), None),
        ((5, 5, 9), FinishReason.STOP),
        ((5, 5, 5), None),
        ((5, 5, 5, 5), FinishReason.LENGTH),
        ((5, 5, 5, 9), FinishReason.STOP),
    ],
)
def test_a_sequence_ends_by_a_stop_token_after_min_tokens_or_by_length(
    produced: tuple[int, ...], expected: FinishReason | None
) -> None:
    params = ResolvedSampling(max_tokens=4, min_tokens=2, stop_token_ids=frozenset({9}))
    assert token_acceptance(params, produced, 0, 98) == (len(produced), expected)
    if produced:
        assert token_acceptance(params, produced[-1:], len(produced) - 1, 98) == (1, expected), "told one by one"


@pytest.mark.parametrize(
    ("tokens", "num_before", "room", "expected"),
    [
        ((5, 9, 5), 1, 50, (2, FinishReason.STOP)),  # what follows a stop was never said
        ((9, 9, 9), 0, 50, (2, FinishReason.STOP)),  # the first of them came before min_tokens
        ((5, 5, 5), 2, 50, (2, FinishReason.LENGTH)),
        ((5, 9, 5), 2, 50, (2, FinishReason.STOP)),  # the last token there may be, and a stop
        ((5, 5, 5), 0, 2, (2, FinishReason.LENGTH)),
        ((5, 5), 0, 50, (2, None)),
    ],
)
def test_of_several_tokens_the_first_that_ends_the_sequence_is_the_last_it_takes(
    tokens: tuple[int, ...], num_before: int, room: int, expected: tuple[int, FinishReason | None]
) -> None:
    params = ResolvedSampling(max_tokens=4, min_tokens=1, stop_token_ids=frozenset({9}))
    assert token_acceptance(params, tokens, num_before, room) == expected


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "n", "expected"),
    [
        (1, 1, 1, 1),  # the last token is never computed
        (4, 1, 1, 1),
        (4, 2, 1, 2),
        (8, 9, 1, 4),
        (9, 1, 2, 2 + 2 * 1 + 1),  # two shared, a tail each, and the source of the copies
        (9, 9, 3, 2 + 3 * 3 + 1),
    ],
)
def test_what_a_request_may_need_alone(num_prompt: int, max_tokens: int, n: int, expected: int) -> None:
    continuations = tuple(Continuation(index) for index in range(n))
    params = ResolvedSampling(max_tokens=max_tokens)
    request = Request("r", (1,) * num_prompt, namespace(4), 0.0, params, continuations=continuations)
    assert blocks_to_finish_alone(request, 1 << 30, 4) == expected


def test_a_limit_on_length_bounds_what_a_request_may_need() -> None:
    request = Request("r", (1,) * 4, namespace(4), 0.0, ResolvedSampling(max_tokens=1000))
    assert blocks_to_finish_alone(request, 9, 4) == 2
