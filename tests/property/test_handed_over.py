"""A request that was begun elsewhere goes on here as if it had never been anywhere else."""

from random import Random

import pytest
from msgspec.structs import replace

from quire.backends.oracle import answer_alone
from quire.core.events import (
    Finished,
    FirstToken,
    PromptLogprobs,
    Queued,
    Refused,
    Replayed,
    RequestEvent,
    SequenceFinished,
    Token,
)
from quire.core.request import Continuation, FinishReason, Request, ResolvedSampling
from quire.engine.commands import Restore, Submit
from quire.errors import QueueFullError
from quire.worker.parent.ledger import Ledger
from tests.support.workers.lives import IDENTITY, VOCABULARY, Lives

SPACE = IDENTITY.namespace(4, "group")


def asked(random: Random) -> Request:
    params = ResolvedSampling(
        max_tokens=random.randint(2, 14),
        stop_token_ids=frozenset({0}) if random.random() < 0.3 else frozenset(),
        frequency_penalty=random.choice([0.0, 0.5]),
        logprobs=random.choice([None, 1]),
        prompt_logprobs=random.choice([None, 1]),
    )
    prompt = tuple(random.randrange(VOCABULARY) for _ in range(random.choice([1, 5, 12])))
    answers = tuple(Continuation(index) for index in range(random.choice([1, 3])))
    return Request("r", prompt, SPACE, 1.0, params, seed=random.randrange(1 << 40), continuations=answers)


def tokens_of(told: list[RequestEvent], index: int) -> list[Token]:
    return [event for event in told if isinstance(event, Token) and event.sequence_index == index]


def ends_of(told: list[RequestEvent]) -> dict[int, FinishReason]:
    return {event.sequence_index: event.reason for event in told if isinstance(event, SequenceFinished)}


def rest_of(request: Request, told: list[RequestEvent]) -> Request:
    """What is still wanted of it, with the tokens its client has."""
    ended = ends_of(told)
    left = tuple(
        Continuation(one.index, (*one.produced, *(event.token_id for event in tokens_of(told, one.index))))
        for one in request.continuations
        if one.index not in ended
    )
    return replace(request, continuations=left)


@pytest.mark.parametrize("seed", range(100))
def test_tokens_ends_and_logprobs_are_those_of_one_server_however_often_it_moves(seed: int) -> None:
    random = Random(seed)
    request = rest = asked(random)
    told: list[RequestEvent] = []
    num_moves = 0
    while True:
        lives = Lives(random, rate=random.choice([0.0, 0.2]))
        lives.submit(rest)
        for _ in range(random.randint(1, 12) if num_moves < 4 else 5_000):
            if not lives.ledger.entries:
                break
            lives.step()
        told += lives.told["r"]
        if not lives.ledger.entries:
            break
        rest, num_moves = rest_of(rest, lives.told["r"]), num_moves + 1
    for one in request.continuations:
        alone = answer_alone(request.prompt, request.params, request.seed, VOCABULARY, one.index)
        came = tokens_of(told, one.index)
        assert [event.token_id for event in came] == alone
        assert [event.num_output_tokens for event in came] == [*range(1, len(alone) + 1)], "counted from its prompt"
        assert all((event.logprobs is None) == (request.params.logprobs is None) for event in came)
    assert set(ends_of(told)) == {one.index for one in request.continuations}
    assert set(ends_of(told).values()) <= {FinishReason.STOP, FinishReason.LENGTH}
    assert sum(isinstance(event, Finished) for event in told) == 1


def begun(*produced: int, arrival_s: float = 3.0) -> Request:
    params = ResolvedSampling(max_tokens=9, prompt_logprobs=1)
    return Request("r", (1, 2, 3), SPACE, arrival_s, params, continuations=(Continuation(0, produced),))


def test_it_goes_to_a_worker_as_one_that_was_let_in_before_with_its_age_and_a_place() -> None:
    ledger = Ledger(VOCABULARY)
    ledger.add(begun(4, 1))
    (command,) = ledger.due_commands(10.0)
    assert isinstance(command, Restore)
    assert (command.continuations, command.age_s, command.has_reservation) == ((Continuation(0, (4, 1)),), 7.0, True)
    fresh = Ledger(VOCABULARY)
    fresh.add(begun())
    assert isinstance(fresh.due_commands(10.0)[0], Submit)


def test_the_first_token_it_hears_of_is_the_next_one_and_what_was_told_elsewhere_is_not_told_again() -> None:
    lives = Lives(Random(1))
    alone = answer_alone((1, 2, 3), begun().params, 0, VOCABULARY)
    lives.submit(begun(*alone[:4]))
    lives.run()
    told = lives.told["r"]
    assert isinstance(told[0], Queued)
    assert [event.token_id for event in tokens_of(told, 0)] == alone[4:]
    assert tokens_of(told, 0)[0].num_output_tokens == 5
    assert not any(isinstance(event, PromptLogprobs | FirstToken) for event in told)
    assert isinstance(told[-1], Finished)
    assert told[-1].num_output_tokens == len(alone)


def test_it_is_replayed_like_any_other_when_its_worker_dies() -> None:
    lives = Lives(Random(1))
    alone = answer_alone((1, 2, 3), begun().params, 0, VOCABULARY)
    lives.submit(begun(*alone[:4]))
    while not tokens_of(lives.told["r"], 0):
        lives.step()
    lives.crash(["r"])
    lives.run()
    assert sum(isinstance(event, Replayed) for event in lives.told["r"]) == 1
    assert [event.token_id for event in tokens_of(lives.told["r"], 0)] == alone[4:]


def test_whoever_is_refused_before_it_was_told_anything_here_may_go_elsewhere() -> None:
    ledger, told = Ledger(VOCABULARY), list[RequestEvent]()
    ledger.add(begun(4, 1))
    ledger.due_commands(0.0)
    refusal = Refused.of("r", QueueFullError(1, 1), 1)
    ledger.take([refusal], told)
    assert told == [refusal]
    assert not ledger.entries
