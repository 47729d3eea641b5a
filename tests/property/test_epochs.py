"""What is said of an assignment that is over reaches nobody, however late it comes and however often."""

from collections.abc import Sequence
from copy import deepcopy
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.core.events import Finished, Queued, RequestEvent, SequenceFinished, Token
from quire.core.request import Continuation, FinishReason, Request, ResolvedSampling
from quire.core.step import StepPlan
from quire.engine.commands import Cancel, Restore, Submit
from quire.worker.parent.ledger import Ledger
from tests.support.workers.lives import IDENTITY, VOCABULARY, Lives, check_told

SPACE = IDENTITY.namespace(4, "group")


def request(number: int, *, n: int = 1, max_tokens: int = 9) -> Request:
    answers = tuple(Continuation(index) for index in range(n))
    params = ResolvedSampling(max_tokens=max_tokens)
    return Request(f"r{number}", (1, 2, number % 3), SPACE, 0.0, params, seed=number, continuations=answers)


@pytest.mark.parametrize("seed", range(60))
def test_late_words_of_dead_workers_reach_no_stream(seed: int) -> None:
    random = Random(seed)
    lives = Lives(random, rate=0.2, late=0.7)
    asked = [request(at, n=random.choice([1, 3])) for at in range(6)]
    for one in asked:
        lives.submit(one)
    lives.run(lambda: lives.crash([]) if random.random() < 0.1 else None)
    assert lives.num_lives == 1 or lives.num_late > 0
    for one in asked:
        check_told(one, lives.told[one.request_id])


@pytest.mark.parametrize("seed", range(20))
def test_late_words_of_who_was_taken_back_for_a_trial_reach_no_stream(seed: int) -> None:
    random = Random(seed)

    def dies(plan: StepPlan) -> bool:
        return any(item.sampling is not None and item.sampling.seed in (1, 2) for item in plan.items)

    lives = Lives(random, dies, late=0.7)
    for at in range(5):
        lives.submit(request(at))
    lives.run()
    for at in range(5):
        ends = [event.reason for event in lives.told[f"r{at}"] if isinstance(event, SequenceFinished)]
        assert ends == [FinishReason.ERROR if at in (1, 2) else FinishReason.LENGTH]
        check_told(request(at), lives.told[f"r{at}"], whole=at not in (1, 2))


def died_once(seed: int, num_steps: int) -> tuple[Ledger, list[RequestEvent], list[RequestEvent]]:
    """A ledger whose second worker has just got all it needs, all that its first one said, and all the second says."""
    lives = Lives(Random(seed))
    for at in range(3):
        lives.submit(request(at, n=1 + at % 2))
    for _ in range(num_steps):
        lives.step()
    lives.crash([])
    said_before, ledger = [*lives.said_before], deepcopy(lives.ledger)
    ledger.due_commands(lives.now_s)
    lives.run()
    return ledger, said_before, [*lives.said]


def told_of(ledger: Ledger, events: Sequence[RequestEvent]) -> list[RequestEvent]:
    ledger, told = deepcopy(ledger), list[RequestEvent]()
    ledger.take(events, told)
    assert not ledger.entries
    return told


@given(st.integers(0, 30), st.integers(1, 12), st.data())
def test_old_words_in_any_order_and_number_change_nothing_of_what_the_next_worker_brings(
    seed: int, num_steps: int, data: st.DataObject
) -> None:
    ledger, old, new = died_once(seed, num_steps)
    if not old:
        return
    mixed = [*new]
    for event in data.draw(st.lists(st.sampled_from(old), max_size=30)):
        mixed.insert(data.draw(st.integers(0, len(mixed))), event)
    assert told_of(ledger, mixed) == told_of(ledger, new)


def test_every_assignment_has_a_larger_number_than_all_before_it() -> None:
    ledger, epochs = Ledger(VOCABULARY), list[int]()
    for at in range(3):
        ledger.add(request(at))
    for _ in range(4):
        epochs += [one.epoch for one in ledger.due_commands(0.0) if not isinstance(one, Cancel)]
        ledger.record_crash([])
    assert epochs == list(range(1, 13))


def suspected() -> Ledger:
    """Two requests that were in flight at two crashes, the first of which now runs alone."""
    ledger = Ledger(VOCABULARY)
    for at in range(3):
        ledger.add(request(at, max_tokens=2))
    for _ in range(2):
        ledger.due_commands(0.0)
        ledger.record_crash(["r0", "r1"])
    (alone,) = ledger.due_commands(0.0)
    assert isinstance(alone, Submit)
    assert (alone.request_id, alone.epoch) == ("r0", 7)
    return ledger


def test_a_suspect_that_is_cleared_is_taken_back_at_once_and_its_late_tokens_are_made_again() -> None:
    ledger, told = suspected(), list[RequestEvent]()
    ledger.take([Queued("r0", epoch=7), Token("r0", 0, 1, 1, None, epoch=7)], told)
    back, next_one = ledger.due_commands(0.0)
    assert (back, type(next_one)) == (Cancel("r0"), Submit)
    told.clear()
    end = SequenceFinished("r0", 0, FinishReason.LENGTH, 2, None, epoch=7)
    ledger.take([Token("r0", 0, 2, 2, None, epoch=7), end], told)
    assert (told, ledger.entries["r0"].tokens, ledger.due_commands(0.0)) == ([], {0: [1]}, [])
    ledger.take([Queued("r1", epoch=8), Token("r1", 0, 1, 1, None, epoch=8)], [])
    again = {one.request_id: one for one in ledger.due_commands(0.0) if not isinstance(one, Cancel)}
    assert {name: type(one) for name, one in again.items()} == {"r0": Restore, "r2": Submit}
    assert again["r0"].continuations == (Continuation(0, (1,)),)


def test_who_has_left_or_has_all_it_wants_is_not_taken_back() -> None:
    ledger, told = Ledger(VOCABULARY), list[RequestEvent]()
    for at in range(4):
        ledger.add(request(at, max_tokens=2))
    for _ in range(2):
        ledger.due_commands(0.0)
        ledger.record_crash(["r0", "r1", "r2"])
    ledger.due_commands(0.0)
    ledger.take([Token("r0", 0, 1, 1, None, epoch=9)], [])
    ledger.cancel("r0")
    (second,) = ledger.due_commands(0.0)
    assert isinstance(second, Submit), "the worker was told to end the first one already"
    ledger.take([Token("r1", 0, 1, 1, None, epoch=10)], [])
    ledger.cancel_answer("r1", 0)
    (third,) = ledger.due_commands(0.0)
    assert isinstance(third, Submit)
    assert third.request_id == "r2"
    first = SequenceFinished("r0", 0, FinishReason.CANCELLED, 1, None, epoch=9)
    ledger.take([first, SequenceFinished("r1", 0, FinishReason.CANCELLED, 1, None, epoch=10)], told)
    assert told == [first], "the other was told when it happened"


def test_what_is_said_after_the_last_event_is_not_heard() -> None:
    ledger, told = Ledger(VOCABULARY), list[RequestEvent]()
    ledger.add(request(0, max_tokens=1))
    ledger.due_commands(0.0)
    whole: list[RequestEvent] = [
        Queued("r0", epoch=1),
        Token("r0", 0, 1, 1, None, epoch=1),
        SequenceFinished("r0", 0, FinishReason.LENGTH, 1, None, epoch=1),
        Finished("r0", 3, 0, 1, epoch=1),
    ]
    ledger.take(whole, told)
    assert [type(event) for event in told] == [type(event) for event in whole]
    told.clear()
    ledger.take(whole, told)
    assert told == []
