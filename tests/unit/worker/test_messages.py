"""What crosses between worker and parent."""

from contextlib import suppress
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.config import ModelSettings
from quire.core.digests import Namespace
from quire.core.events import Admitted, Finished, Preempted, PromptLogprobs, RequestEvent, SequenceFinished, Token
from quire.core.prefix_tree import Divergence, MissReason
from quire.core.request import Continuation, FinishReason, PriorityClass, Request, SamplingParams
from quire.core.step import TokenLogprobs
from quire.core.waiting_queue import QueueConfig
from quire.engine.engine import ModelIdentity
from quire.errors import (
    DuplicateRequestError,
    MessageError,
    QueueFullError,
    QuireError,
    RequestTooLargeError,
    TenantShareError,
)
from quire.worker import messages
from quire.worker.messages import Load, Refused, Stepped, decode_to_parent, decode_to_worker, encode

LOGPROBS = TokenLogprobs(7, -0.25, 1, ((7, -0.25), (9, -2.5)))
REQUEST = Request(
    "a" * 32,
    (1, 2, 3),
    Namespace(1, "model", "", "layout", 32, "group"),
    12.5,
    SamplingParams(
        max_tokens=5,
        logit_bias=((3, 1.5),),
        allowed_token_ids=(1, 2),
        stop_token_ids=frozenset({0, 2}),
        logprobs=2,
    ),
    seed=(1 << 63) - 1,
    tenant="someone",
    priority=PriorityClass.LOW,
    continuations=(Continuation(0, (4, 5)), Continuation(2)),
    deadline_s=99.0,
    is_promised=True,
)
EVENTS: list[RequestEvent] = [
    Admitted("a", 1.0, 0.5, 32),
    Admitted("a", 1.0, 0.5, 32, Divergence(32, MissReason.DIVERGED, 33, (5, 6))),
    PromptLogprobs("a", 1, (LOGPROBS,)),
    Token("a", 1, 2.0, 7, 3, LOGPROBS),
    Token("a", 0, 2.0, 7, 3, None),
    Preempted("a", 0, 2.5),
    SequenceFinished("a", 1, 3.0, FinishReason.ERROR, 3, "why"),
    SequenceFinished("a", 0, 3.0, FinishReason.DISPLACED, 0, None, 7),
    Finished("a", 3.0, 3, 32, 6),
]
TO_WORKER = [
    messages.Open("model", ModelSettings(memory_bytes=1 << 30), QueueConfig(tenant_weights={"a": 2.0}), bytes(32)),
    messages.Submit(REQUEST),
    messages.Restore(REQUEST),
    messages.Cancel("a"),
    messages.Explain(7, REQUEST.namespace, (1, 2, 3)),
    messages.ClearCache(),
    messages.Close(),
]
TO_PARENT = [
    messages.Progress("loading", 1, 2),
    messages.Ready(ModelIdentity("model", "layout"), 32, 100, 49152, 4096, "line", ("note",)),
    messages.Failed("ConfigError", "why"),
    messages.Taken("a"),
    Refused("a", "QueueFullError", (5, 4)),
    messages.Explained(7, Divergence(32, MissReason.OTHER_NAMESPACE, other_namespace=REQUEST.namespace)),
    messages.Explained(8, Divergence(32, MissReason.EVICTED, evicted_at_s=1.5)),
    Stepped.of(EVENTS, {"a": 32}, Load(1, 2, 3, 4, 5, 6, (7, 8))),
]


@pytest.mark.parametrize("message", TO_WORKER, ids=lambda one: type(one).__name__)
def test_what_is_said_to_a_worker_arrives_as_it_was_said(message: messages.ToWorker) -> None:
    assert decode_to_worker(encode(message)) == message


@pytest.mark.parametrize("message", TO_PARENT, ids=lambda one: type(one).__name__)
def test_what_a_worker_says_arrives_as_it_was_said(message: messages.ToParent) -> None:
    assert decode_to_parent(encode(message)) == message


def test_events_keep_their_order_and_their_kinds() -> None:
    arrived = decode_to_parent(encode(Stepped.of(EVENTS, {}, Load())))
    assert isinstance(arrived, Stepped)
    assert arrived.events == EVENTS
    assert [type(event) for event in arrived.events] == [type(event) for event in EVENTS]


@pytest.mark.parametrize(
    "error",
    [
        QueueFullError(5, 4, 7),
        TenantShareError("someone", 3, 2, 9, "open"),
        DuplicateRequestError("a"),
        RequestTooLargeError("a request may have 4 tokens, 5 given"),
    ],
    ids=lambda one: type(one).__name__,
)
def test_a_refusal_is_the_same_error_on_the_other_side(error: QuireError) -> None:
    told = decode_to_parent(encode(Refused.of("r", error)))
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
        data = bytearray(encode(message))
        for _ in range(random.randint(1, 3)):
            data[random.randrange(len(data))] = random.randrange(256)
        del data[random.choice([len(data), random.randint(0, len(data))]) :]
        for decode in (decode_to_worker, decode_to_parent):
            try:
                decode(bytes(data))
            except MessageError:
                num_errors += 1
    assert num_errors > 3_000
