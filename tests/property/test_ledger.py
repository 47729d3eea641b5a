"""A worker may die at any step, and no client can tell."""

from random import Random

import pytest

from quire.core.events import Admitted, Finished, PromptLogprobs, Queued, Refused, RequestEvent, SequenceFinished, Token
from quire.core.request import Continuation, FinishReason, PriorityClass, Request, ResolvedSampling
from quire.core.step import StepPlan
from quire.engine.commands import Restore, Submit
from quire.errors import MessageError, QueueFullError
from quire.worker.parent.ledger import QUARANTINED, Ledger
from tests.support.errors import raises_code
from tests.support.workers.lives import CONFIG, IDENTITY, VOCABULARY, Lives, check_told

POISON_SEED = 666


def request(random: Random, number: int, *, n: int = 1, seed: int | None = None) -> Request:
    stem = (
        [random.randrange(VOCABULARY) for _ in range(random.choice([1, 4, 12]))] if random.random() < 0.5 else [1] * 9
    )
    params = ResolvedSampling(
        max_tokens=random.randint(1, 12),
        stop_token_ids=frozenset({0}) if random.random() < 0.3 else frozenset(),
        logprobs=random.choice([None, None, 1]),
        prompt_logprobs=random.choice([None, None, None, 1]),
        frequency_penalty=random.choice([0.0, 0.5]),
    )
    return Request(
        f"r{number}",
        (*stem, random.randrange(VOCABULARY)),
        IDENTITY.namespace(4, "group"),
        float(number),
        params,
        seed=number if seed is None else seed,
        priority=random.choice([*PriorityClass]),
        continuations=tuple(Continuation(index) for index in range(n)),
    )


@pytest.mark.parametrize("seed", range(120))
def test_whoever_dies_and_whenever_each_client_gets_what_it_would_get_alone(seed: int) -> None:
    random = Random(seed)
    rate = random.choice([0.02, 0.1, 0.3])
    lives = Lives(random, rate=rate, lies=random.choice([0.0, 0.05]))
    asked = [request(random, at, n=random.choice([1, 1, 1, 3])) for at in range(14)]
    waiting, cancelled, dropped = list(asked), set(), set()

    def come_and_go() -> None:
        if waiting and random.random() < 0.5:
            lives.submit(waiting.pop())
        if random.random() < 0.03:
            cancelled.add(gone := random.choice(asked).request_id)
            lives.cancel(gone)
        if random.random() < 0.1:
            one = random.choice(asked)
            dropped.add(one.request_id)
            lives.drop(one.request_id, random.randrange(3))
        if random.random() < rate / 4:
            lives.crash([])  # killed from outside, between two steps

    lives.submit(waiting.pop())
    lives.run(come_and_go)
    while waiting:
        lives.submit(waiting.pop())
        lives.run(come_and_go)
    assert lives.num_lives > 1 or rate < 0.05
    for one in asked:
        told = lives.told[one.request_id]
        check_told(one, told, whole=one.request_id not in cancelled | dropped)
        assert sum(isinstance(event, Admitted) for event in told) <= 1
        assert not any(isinstance(event, Refused) for event in lives.told[one.request_id])


@pytest.mark.parametrize("seed", range(40))
def test_of_all_in_flight_only_the_one_that_kills_is_ended(seed: int) -> None:
    random = Random(seed)
    after = random.choice([0, 0, 3])

    def dies(plan: StepPlan) -> bool:
        return any(
            item.sampling is not None and item.sampling.seed == POISON_SEED and item.sampling.num_output_tokens >= after
            for item in plan.items
        )

    lives = Lives(random, dies)
    healthy = [request(random, at) for at in range(7)]
    poison = request(random, 99, seed=POISON_SEED)
    asked = random.sample([*healthy, poison], 8)
    for one in asked:
        lives.submit(one)
    lives.run()
    for one in healthy:
        check_told(one, lives.told[one.request_id])
    ends = [event for event in lives.told["r99"] if isinstance(event, SequenceFinished)]
    if poison.params.max_tokens > after:
        assert [(end.reason, end.code) for end in ends] in (
            [(FinishReason.ERROR, QUARANTINED)],
            [(FinishReason.STOP, None)],
        )
    # Two crashes among others, perhaps one more because a step forward came between, and one alone.
    assert lives.num_lives <= 6
    check_told(poison, lives.told["r99"], whole=False)


@pytest.mark.parametrize("seed", range(20))
def test_a_replayed_request_reports_what_its_first_worker_found_in_the_cache(seed: int) -> None:
    random, is_dying = Random(seed), False
    namespace, num_answers = IDENTITY.namespace(4, "group"), random.choice([1, 3])
    lives = Lives(random, lambda _plan: is_dying)
    lives.submit(Request("r0", (1,) * 20, namespace, 1.0, ResolvedSampling(max_tokens=3)))
    lives.run()
    answers = tuple(Continuation(index) for index in range(num_answers))
    names = ["r1", "r2"]
    for name, length in zip(names, (20, 13), strict=True):
        lives.submit(
            Request(name, (1,) * length, namespace, 2.0, ResolvedSampling(max_tokens=9), seed, continuations=answers)
        )
    while not all(any(isinstance(event, Admitted) for event in lives.told[name]) for name in names):
        lives.step()
    is_dying = True
    lives.step()
    is_dying = False
    lives.run()
    assert lives.num_lives == 2
    finished = [lives.told[name][-1] for name in names]
    assert [one.num_cached_tokens for one in finished if isinstance(one, Finished)] == [16, 12]


def three_answers() -> Request:
    answers = tuple(Continuation(index) for index in range(3))
    params = ResolvedSampling(max_tokens=9)
    return Request("r1", (1, 2), IDENTITY.namespace(4, "group"), 3.0, params, continuations=answers)


def indices(told: list[RequestEvent], kind: type[Token | SequenceFinished]) -> list[int]:
    return [event.sequence_index for event in told if isinstance(event, kind)]


def begun() -> Lives:
    """Three answers of which each has a token or two, and no word on its way."""
    lives = Lives(Random(1))
    lives.submit(three_answers())
    while len(set(indices(lives.told["r1"], Token))) < 3 or lives.is_speaking:
        lives.step()
    return lives


def test_an_answer_that_ends_alone_ends_once_and_what_the_worker_says_of_it_is_not_told() -> None:
    lives = begun()
    num_tokens = indices(lives.told["r1"], Token).count(1)
    lives.drop("r1", 1)
    lives.drop("r1", 1)
    lives.drop("r1", 7)
    lives.drop("never seen", 0)
    lives.run()
    told = lives.told["r1"]
    check_told(three_answers(), told, whole=False)
    assert indices(told, Token).count(1) == num_tokens
    assert [indices(told, Token).count(index) for index in (0, 2)] == [9, 9]
    assert sorted(indices(told, SequenceFinished)) == [0, 1, 2]


def test_no_worker_is_asked_again_for_an_answer_that_has_ended_alone() -> None:
    lives = begun()
    lives.drop("r1", 0)
    lives.crash(["r1"])
    (again,) = lives.ledger.due_commands(lives.now_s)
    assert isinstance(again, Restore)
    assert [one.index for one in again.continuations] == [1, 2]


def test_a_request_all_of_whose_answers_ended_alone_ends_with_its_worker() -> None:
    lives = begun()
    for index in range(3):
        lives.drop("r1", index)
    assert not any(isinstance(event, Finished) for event in lives.told["r1"])
    lives.crash(["r1"])
    assert isinstance(lives.told["r1"][-1], Finished)
    assert not lives.ledger.entries


def test_answers_that_end_alone_while_no_worker_has_them_are_not_asked_for() -> None:
    lives = Lives(Random(1))
    lives.submit(three_answers())
    lives.drop("r1", 0)
    lives.drop("r1", 2)
    (command,) = lives.ledger.due_commands(lives.now_s)
    assert isinstance(command, Submit)
    assert [one.index for one in command.continuations] == [1]
    lives.crash([])
    lives.drop("r1", 1)
    assert not lives.ledger.entries
    assert sorted(indices(lives.told["r1"], SequenceFinished)) == [0, 1, 2]


def test_a_worker_that_ends_an_answer_twice_or_forgets_to_end_it_is_not_believed() -> None:
    lives = begun()
    lives.drop("r1", 0)
    end = SequenceFinished("r1", 0, FinishReason.CANCELLED, 2, None, epoch=1)
    told: list[RequestEvent] = []
    lives.ledger.take([end], told)
    assert told == []
    with raises_code(MessageError, "answer_not_open"):
        lives.ledger.take([end], told)
    lives = begun()
    for index in range(3):
        lives.drop("r1", index)
    with raises_code(MessageError, "finished_too_early"):
        lives.ledger.take([Finished("r1", 2, 0, 3, epoch=1)], told)


def test_who_is_cancelled_while_no_worker_has_it_ends_when_that_happens() -> None:
    lives = Lives(Random(1))
    lives.submit(Request("r1", (1, 2), IDENTITY.namespace(4, "group"), 3.0, ResolvedSampling()))
    commands, events = lives.ledger.cancel("r1")
    assert (commands, [type(event) for event in events]) == ([], [SequenceFinished, Finished])
    assert lives.ledger.num_progress == 0


@pytest.mark.parametrize("seed", range(20))
def test_prompt_logprobs_come_once_each_whatever_dies(seed: int) -> None:
    random = Random(seed)
    lives = Lives(random, rate=0.3)
    params = ResolvedSampling(max_tokens=2, prompt_logprobs=1)
    prompt = tuple(random.randrange(VOCABULARY) for _ in range(50))
    lives.submit(Request("r1", prompt, IDENTITY.namespace(4, "group"), 1.0, params))
    lives.run()
    told = [event for event in lives.told["r1"] if isinstance(event, PromptLogprobs)]
    positions = [one.first_position + at for one in told for at in range(len(one.logprobs))]
    assert positions == list(range(1, 50))


def test_who_is_held_beyond_its_deadline_is_ended_without_a_worker() -> None:
    lives = Lives(Random(1))
    late = Request("r1", (1, 2), IDENTITY.namespace(4, "group"), 0.0, ResolvedSampling(), deadline_s=5.0)
    lives.submit(late)
    assert lives.ledger.expire(4.9) == []
    reasons = [event.reason for event in lives.ledger.expire(5.0) if isinstance(event, SequenceFinished)]
    assert reasons == [FinishReason.DEADLINE]
    assert not lives.ledger.entries


def test_a_refusal_reaches_who_asked_and_nothing_is_kept() -> None:
    lives = Lives(Random(1))
    lives.submit(Request("r1", (1, 2), IDENTITY.namespace(4, "group"), 0.0, ResolvedSampling()))
    lives.ledger.due_commands(lives.now_s)
    refusal, told = Refused.of("r1", QueueFullError(3, 2), 1), list[RequestEvent]()
    lives.ledger.take([refusal], told)
    assert told == [refusal]
    assert not lives.ledger.entries


def displaced(epoch: int, num_tokens: int = 0, retry_after_s: int | None = 3) -> list[RequestEvent]:
    return [
        SequenceFinished("r1", 0, FinishReason.DISPLACED, num_tokens, None, retry_after_s, epoch=epoch),
        Finished("r1", 2, 0, num_tokens, epoch=epoch),
    ]


def sent(lives: Lives) -> Ledger:
    """A ledger whose only request a worker has let in."""
    lives.submit(Request("r1", (1, 2), IDENTITY.namespace(4, "group"), 0.0, ResolvedSampling(max_tokens=9)))
    lives.ledger.due_commands(lives.now_s)
    lives.ledger.take([Queued("r1", epoch=1)], [])
    return lives.ledger


def test_a_request_that_its_worker_displaced_is_over() -> None:
    ledger = sent(Lives(Random(1)))
    assert ledger.num_open_of == {"default": 1}
    told: list[RequestEvent] = []
    ledger.take(displaced(1), told)
    assert [type(event) for event in told] == [SequenceFinished, Finished]
    assert (ledger.entries, ledger.num_open_of) == ({}, {})


def test_a_worker_that_dies_before_it_could_tell_of_a_displacement_is_asked_again() -> None:
    ledger = sent(Lives(Random(1)))
    ledger.record_crash([])
    (again,) = ledger.due_commands(3.0)
    assert isinstance(again, Restore)
    assert not again.has_reservation, "nobody has seen anything of it: it may be displaced again"
    told: list[RequestEvent] = []
    ledger.take(displaced(2), told)
    assert [type(event) for event in told] == [SequenceFinished, Finished]


def test_what_a_client_has_seen_keeps_its_place_in_the_next_worker() -> None:
    ledger = sent(Lives(Random(1)))
    ledger.take([Admitted("r1", 1.0, 1.0, 0, epoch=1), Token("r1", 0, 1, 1, None, epoch=1)], [])
    ledger.record_crash(["r1"])
    (again,) = ledger.due_commands(3.0)
    assert isinstance(again, Restore)
    assert again.has_reservation


@pytest.mark.parametrize(
    "events",
    [
        [Token("r1", 0, 1, 1, None, epoch=1), *displaced(1, 1)],
        displaced(1, retry_after_s=None),
        [SequenceFinished("r1", 0, FinishReason.LENGTH, 0, None, 3, epoch=1)],
    ],
)
def test_a_worker_that_displaces_in_the_middle_of_an_answer_is_not_believed(events: list[RequestEvent]) -> None:
    ledger = sent(Lives(Random(1)))
    with raises_code(MessageError, "invalid_displacement"):
        ledger.take(events, [])


@pytest.mark.parametrize(("name", "epoch"), [("stranger", 0), ("r1", 0), ("r1", 1), ("r1", -1)])
def test_a_worker_that_speaks_of_what_it_was_not_given_is_not_believed(name: str, epoch: int) -> None:
    lives = Lives(Random(1))
    lives.submit(Request("r1", (1, 2), IDENTITY.namespace(4, "group"), 0.0, ResolvedSampling()))
    with raises_code(MessageError, "event_not_assigned"):
        lives.ledger.take([Queued(name, epoch=epoch)], [])


@pytest.mark.parametrize(("name", "epoch"), [("stranger", 1), ("r1", 2), ("r1", 0)])
def test_a_worker_that_gives_an_assignment_another_name_is_not_believed(name: str, epoch: int) -> None:
    ledger = sent(Lives(Random(1)))
    with raises_code(MessageError, "event_not_assigned"):
        ledger.take([Token(name, 0, 1, 1, None, epoch=epoch)], [])


def test_the_pool_of_these_tests_is_small_enough_to_preempt() -> None:
    assert CONFIG.max_running * CONFIG.max_sequence_tokens > 64 * 4
