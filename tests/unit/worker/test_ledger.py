"""What a worker says that cannot be is an error; what it refuses late is the end of one request."""

import pytest

from quire.core.events import (
    Finished,
    FirstToken,
    PromptLogprobs,
    PromptProgress,
    Queued,
    Refused,
    Replayed,
    RequestEvent,
    SequenceFinished,
    Token,
)
from quire.core.request import FinishReason, Request
from quire.core.step import TokenLogprobs
from quire.engine.engine import ModelIdentity
from quire.errors import MessageError, QueueFullError
from quire.worker.parent.ledger import Ledger
from tests.support.errors import raises_code

REQUEST = Request("a", (1, 2, 3), ModelIdentity("model", "layout").namespace(4, "group"), 0.0)
LOGPROBS = TokenLogprobs(1, -1.0, 1, ())
LIES: dict[str, tuple[RequestEvent, str]] = {
    "an answer that was not asked for": (Token("a", 7, 1, 1, None, epoch=1), "answer_not_open"),
    "a token too early": (Token("a", 0, 1, 5, None, epoch=1), "unexpected_token"),
    "a token beyond the vocabulary": (Token("a", 0, 10, 1, None, epoch=1), "unexpected_token"),
    "an end that nobody asked for": (
        SequenceFinished("a", 0, FinishReason.CANCELLED, 0, None, None, epoch=1),
        "not_cancelled",
    ),
    "the end of all before the end of one": (Finished("a", 3, 0, 0, epoch=1), "finished_too_early"),
    "a prompt's log-probabilities out of order": (
        PromptLogprobs("a", 2, (LOGPROBS,), epoch=1),
        "logprobs_out_of_order",
    ),
    "more of the prompt than there is": (PromptProgress("a", 4, 0, epoch=1), "invalid_progress"),
    "more of the prompt found than there is": (PromptProgress("a", 3, 4, epoch=1), "invalid_progress"),
    "what came before its own life": (Replayed("a", epoch=1), "unexpected_event"),
}


def ledger() -> Ledger:
    """With one request that a worker has taken."""
    books = Ledger(vocabulary_size=10)
    books.add(REQUEST)
    books.due_commands(0.0)
    books.take([Queued("a", epoch=1)], [])
    return books


@pytest.mark.parametrize("name", LIES)
def test_what_cannot_be_is_an_error(name: str) -> None:
    event, code = LIES[name]
    with raises_code(MessageError, code):
        ledger().take([event], [])


def test_progress_is_passed_on_until_the_first_token_and_not_when_another_worker_computes_the_prompt_again() -> None:
    books, seen = ledger(), list[RequestEvent]()
    books.take([PromptProgress("a", 2, 0, epoch=1)], seen)
    books.record_crash(["a"])
    books.due_commands(0.0)
    books.take([PromptProgress("a", 1, 0, epoch=2), FirstToken("a", 0, epoch=2)], seen)
    books.record_crash(["a"])
    books.due_commands(0.0)
    books.take([PromptProgress("a", 1, 0, epoch=3)], seen)
    assert [event.num_computed_tokens for event in seen if isinstance(event, PromptProgress)] == [2, 1]


def test_more_cached_tokens_than_the_prompt_has_are_an_error() -> None:
    with raises_code(MessageError, "malformed_message"):
        ledger().take([FirstToken("a", 4, epoch=1)], [])


def test_a_request_that_began_and_is_refused_by_the_next_worker_ends_with_the_reason() -> None:
    books, events = ledger(), list[RequestEvent]()
    books.take([Token("a", 0, 3, 1, None, epoch=1)], [])
    books.record_crash([])
    books.due_commands(0.0)
    books.take([Refused.of("a", QueueFullError(1, 1), 2)], events)
    assert [type(event) for event in events] == [SequenceFinished, Finished]
    assert isinstance(events[0], SequenceFinished)
    assert events[0].reason is FinishReason.ERROR
    assert not books.entries


@pytest.mark.parametrize(("says_first_again", "num_cached"), [(False, 2), (True, 0)])
def test_who_made_the_first_pass_may_count_better_at_the_end_and_nobody_else(
    says_first_again: bool, num_cached: int
) -> None:
    books, told = ledger(), list[RequestEvent]()
    books.take([FirstToken("a", 0, epoch=1), Token("a", 0, 1, 1, None, epoch=1)], told)
    epoch = 1
    if says_first_again:
        books.record_crash([])
        books.due_commands(1.0)
        epoch = 2
        books.take([FirstToken("a", 2, epoch=2)], told)
    end = SequenceFinished("a", 0, FinishReason.STOP, 1, None, epoch=epoch)
    books.take([end, Finished("a", 3, 2, 1, epoch=epoch)], told)
    assert told[-1] == Finished("a", 3, num_cached, 1)
