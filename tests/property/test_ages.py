"""Two processes need not agree what time it is: nothing that crosses between them is an instant."""

from collections.abc import Iterator
from dataclasses import fields
from random import Random
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from quire.config import ModelSettings
from quire.core.events import Admitted, Finished, RequestEvent, SequenceFinished
from quire.core.request import Continuation, FinishReason, PriorityClass, Request, ResolvedSampling
from quire.core.scheduling.waiting_queue import QueueConfig
from quire.core.step import StepPlan
from quire.engine.commands import Cancel, Submit
from quire.engine.engine import Engine
from quire.worker.messages import ToParent, ToWorker, decode_to_worker, encode_message
from quire.worker.parent.ledger import Ledger
from tests.support.workers.lives import CONFIG, IDENTITY, VOCABULARY, DyingRunner, Lives
from tests.support.workers.messages import REQUEST

MILLION_S = 1_000_000.0
DURATIONS = {
    *(
        "age_s",
        "time_left_s",
        "wait_s",
        "evicted_s_ago",
        "retry_after_s",
        "keep_s",
        "grammar_compile_s",
        "grammar_mask_s",
    ),
    "period_s",
}
"""All numbers of seconds that are said of requests, and of what a worker has spent."""
SETTINGS = {one.name for kind in (ModelSettings, QueueConfig) for one in fields(kind)}


def names_in(kind: Any) -> Iterator[str]:
    """Of every field that is reached from a message."""
    seen: set[int] = set()
    todo = [msgspec.inspect.type_info(kind)]
    while todo:
        one: Any = todo.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        for field in getattr(one, "fields", ()):
            yield field.encode_name
            todo.append(field.type)
        todo += [*getattr(one, "types", ()), *getattr(one, "item_types", ())]
        todo += [getattr(one, name) for name in ("item_type", "value_type") if hasattr(one, name)]


@pytest.mark.parametrize("kind", [ToWorker, ToParent])
def test_every_number_of_seconds_that_crosses_is_a_duration(kind: Any) -> None:
    names = {*names_in(kind)} - SETTINGS
    assert {"epoch", "prompt" if kind is ToWorker else "sequence_index"} <= names, "they are all found"
    seconds = {name for name in names if name.endswith("_s") or "_s_" in name}
    assert seconds
    assert seconds <= DURATIONS


times = st.integers(-(10**9), 10**9).map(lambda ticks: ticks / 1024)


@given(times, times, times, st.none() | times)
def test_a_request_is_as_old_and_has_as_long_on_any_clock(
    sent_s: float, received_s: float, arrival_s: float, deadline_s: float | None
) -> None:
    ledger = Ledger()
    ledger.add(replace(REQUEST, arrival_s=arrival_s, deadline_s=deadline_s))
    (command,) = ledger.due_commands(sent_s)
    arrived = decode_to_worker(encode_message(command))
    assert arrived == command
    assert not isinstance(command, Cancel)
    request = command.to_request(received_s)
    assert received_s - request.arrival_s == sent_s - arrival_s
    left_s = None if request.deadline_s is None else request.deadline_s - received_s
    assert left_s == (None if deadline_s is None else deadline_s - sent_s)
    assert replace(request, arrival_s=12.5, deadline_s=99.0, epoch=0) == REQUEST


def disturbed(seed: int, ahead_s: float) -> tuple[dict[str, list[RequestEvent]], list[StepPlan]]:
    """What clients are told and what is computed where workers die, requests have deadlines, and clocks differ."""
    random = Random(seed)
    lives = Lives(random, rate=0.2, ahead_s=ahead_s)
    waiting = [
        Request(
            f"r{at}",
            tuple(random.randrange(3) for _ in range(random.choice([2, 9, 20]))),
            IDENTITY.namespace(4, "group"),
            0.0,
            ResolvedSampling(max_tokens=random.randint(1, 12)),
            seed=at,
            priority=random.choice([*PriorityClass]),
            continuations=tuple(Continuation(index) for index in range(random.choice([1, 1, 2]))),
            deadline_s=random.choice([None, 3.0, 20.0]),
        )
        for at in range(40)
    ]

    def come() -> None:
        for _ in range(min(len(waiting), random.choice([0, 0, 3]))):
            one = waiting.pop()
            left_s = one.deadline_s
            deadline_s = None if left_s is None else lives.now_s + left_s
            lives.submit(replace(one, arrival_s=lives.now_s, deadline_s=deadline_s))
        for event in lives.ledger.expire(lives.now_s):
            lives.told[event.request_id].append(event)

    while waiting:
        come()
        lives.run(come)
    assert lives.num_lives > 1
    return lives.told, lives.plans


@pytest.mark.parametrize("ahead_s", [MILLION_S, -MILLION_S])
@pytest.mark.parametrize("seed", range(6))
def test_a_worker_whose_clock_is_a_million_seconds_off_does_and_tells_the_same(seed: int, ahead_s: float) -> None:
    told, plans = disturbed(seed, ahead_s)
    there, here = disturbed(seed, 0.0)
    assert told == there
    assert plans == here
    events = [event for events in told.values() for event in events]
    assert sum(isinstance(event, Finished) for event in events) == 40
    assert FinishReason.DEADLINE in {event.reason for event in events if isinstance(event, SequenceFinished)}
    assert all(0.0 <= event.wait_s < 1000.0 for event in events if isinstance(event, Admitted))


def keys_in_a_new_worker(ledger: Ledger, now_s: float, ahead_s: float) -> list[float]:
    """The urgency of each request where the clock is so far ahead, as it would be on ours."""
    engine = Engine(DyingRunner(lambda _plan: False), CONFIG, IDENTITY, bytes(32))
    for command in ledger.due_commands(now_s):
        assert not isinstance(command, Cancel)
        enter = engine.submit if isinstance(command, Submit) else engine.restore
        told: list[RequestEvent] = []
        ledger.take([enter(command.to_request(now_s + ahead_s))], told)
    return [live.leader.key[0] - ahead_s for live in engine.scheduler.live.values()]


@pytest.mark.parametrize("ahead_s", [0.0, MILLION_S, -MILLION_S])
def test_who_is_asked_again_after_a_crash_keeps_its_head_start(ahead_s: float) -> None:
    ledger, space = Ledger(VOCABULARY), IDENTITY.namespace(4, "group")
    ledger.add(Request("old", (1, 2), space, 5.0, priority=PriorityClass.NORMAL))
    ledger.add(Request("later", (1, 2), space, 50.0, priority=PriorityClass.HIGH))
    assert keys_in_a_new_worker(ledger, 60.0, ahead_s) == [-15.0, -10.0], "arrival less the head start of its class"
    ledger.record_crash([])
    assert keys_in_a_new_worker(ledger, 3600.0, ahead_s) == [-15.0, -10.0]
