"""What crosses between worker and parent."""

from contextlib import suppress
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.core.events import Refused
from quire.errors import (
    DuplicateRequestError,
    InvalidParameterError,
    MessageError,
    QueueFullError,
    QuireError,
    RequestTooLargeError,
    TenantShareError,
)
from quire.worker import messages
from quire.worker.messages import Stepped, WorkerLoad, decode_to_parent, decode_to_worker, encode_message
from tests.support.workers.messages import EVENTS, TO_PARENT, TO_WORKER


@pytest.mark.parametrize("message", TO_WORKER, ids=lambda one: type(one).__name__)
def test_what_is_said_to_a_worker_arrives_as_it_was_said(message: messages.ToWorker) -> None:
    assert decode_to_worker(encode_message(message)) == message


@pytest.mark.parametrize("message", TO_PARENT, ids=lambda one: type(one).__name__)
def test_what_a_worker_says_arrives_as_it_was_said(message: messages.ToParent) -> None:
    assert decode_to_parent(encode_message(message)) == message


def test_events_keep_their_order_and_their_kinds() -> None:
    arrived = decode_to_parent(encode_message(Stepped(tuple(EVENTS), WorkerLoad())))
    assert isinstance(arrived, Stepped)
    assert arrived.events == tuple(EVENTS)
    assert [type(event) for event in arrived.events] == [type(event) for event in EVENTS]


@pytest.mark.parametrize(
    "error",
    [
        QueueFullError(5, 4, 7),
        TenantShareError("someone", 3, 2, 9, "open"),
        DuplicateRequestError("a"),
        RequestTooLargeError("expected at most 4 tokens, got 5"),
        InvalidParameterError("expected top_p to be a number from 0.0 to 1.0, got 2", "top_p"),
        InvalidParameterError("expected a prompt as text or as a list of token ids, got 5"),
    ],
    ids=lambda one: type(one).__name__,
)
def test_a_refusal_is_the_same_error_on_the_other_side(error: QuireError) -> None:
    message = decode_to_parent(encode_message(Stepped((Refused.of("r", error),), WorkerLoad())))
    assert isinstance(message, Stepped)
    (told,) = message.events
    assert isinstance(told, Refused)
    assert (type(told.error), str(told.error), vars(told.error)) == (type(error), str(error), vars(error))


@pytest.mark.parametrize("told", [Refused("r", "SystemExit", ()), Refused("r", "QueueFullError", (1,))])
def test_a_refusal_that_cannot_be_is_no_message(told: Refused) -> None:
    with pytest.raises(MessageError):
        _ = told.error


@given(st.binary(max_size=200))
def test_any_bytes_are_a_message_or_a_message_error(data: bytes) -> None:
    for decode in (decode_to_worker, decode_to_parent):
        with suppress(MessageError):
            decode(data)


def test_a_changed_message_is_a_message_or_a_message_error() -> None:
    random, num_errors = Random(7), 0
    for message in [*TO_WORKER, *TO_PARENT] * 300:
        data = bytearray(encode_message(message))
        for _ in range(random.randint(1, 3)):
            data[random.randrange(len(data))] = random.randrange(256)
        del data[random.choice([len(data), random.randint(0, len(data))]) :]
        for decode in (decode_to_worker, decode_to_parent):
            try:
                decode(bytes(data))
            except MessageError:
                num_errors += 1
    assert num_errors > 3_000
