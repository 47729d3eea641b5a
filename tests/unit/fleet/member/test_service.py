"""A member's desk: who asks what, who hears what, and what is left when a gateway has gone."""

from dataclasses import replace as changed
from math import inf, nan
from typing import Any

import pytest
from msgspec.structs import replace

from quire.core.events import Admitted, Finished, FirstToken, Queued, Refused, Token
from quire.core.request import Continuation, ResolvedSampling
from quire.engine.calls import CallError, CallReply, EngineCall, Explain, Explained, GetBlock
from quire.engine.commands import Cancel, Restore, Submit
from quire.errors import DrainingError, MessageError, QuireError
from quire.fleet.gateway.request import FleetRequest
from quire.fleet.member.service import MAX_SILENT_S, MemberService
from quire.fleet.protocol.messages import (
    PROTOCOL,
    Assign,
    GatewayBeat,
    Goodbye,
    GoodbyeAck,
    Hello,
    MemberBeat,
    MemberCard,
    MemberStepped,
    RequestTextAssets,
    ToGateway,
    Welcome,
)
from quire.worker.parent.supervisor import State
from tests.support.errors import raises_code
from tests.support.fleet.desk_fleets import SPACE, WORDS, EngineSeat, SimulatedFleet, asked
from tests.support.workers.lives import VOCABULARY, check_told

OTHER_SPACE = changed(SPACE, model="another")


class Desk:
    """A desk, what it said to whom, and who does not answer."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.said: dict[bytes, list[ToGateway]] = {}
        self.gone: set[bytes] = set()
        self.seat = EngineSeat(lambda: self.now_s)
        card = MemberCard("oracle", self.seat.engine.info, "life")
        self.desk = MemberService(self.seat, card, WORDS, self._send, lambda: self.now_s)
        self.seat.tell = self.desk.on_events

    def _send(self, identity: bytes, message: ToGateway) -> bool:
        if identity in self.gone:
            return False
        self.said.setdefault(identity, []).append(message)
        return True

    def greet(self, *identities: bytes) -> None:
        for identity in identities:
            self.desk.receive(identity, Hello(PROTOCOL, "gateway"))
            self.said[identity].clear()

    def events(self, identity: bytes) -> list[Any]:
        return [event for one in self.said[identity] if isinstance(one, MemberStepped) for event in one.events]

    def steps(self, num_steps: int = 20) -> None:
        for _ in range(num_steps):
            self.seat.step()


def command(number: int = 0, **changes: Any) -> Submit | Restore:
    (one,) = FleetRequest.of(asked(number), VOCABULARY).ledger.due_commands(0.0)
    assert isinstance(one, Submit)
    return replace(one, **changes)


def test_hello_is_answered_by_who_and_how_it_is() -> None:
    desk = Desk()
    desk.desk.receive(b"g", Hello(PROTOCOL, "gateway"))
    welcome, beat = desk.said[b"g"]
    assert isinstance(welcome, Welcome)
    assert welcome.card.incarnation == "life"
    assert isinstance(beat, MemberBeat)
    assert (beat.state, beat.report.num_received) == ("ready", 0)


def test_whoever_has_not_said_hello_is_not_heard() -> None:
    desk = Desk()
    for message in (
        GatewayBeat(),
        RequestTextAssets(),
        Assign(command(), 6),
        Cancel("r0"),
        EngineCall(1, Explain(SPACE, (1,))),
    ):
        with raises_code(MessageError, "hello_missing"):
            desk.desk.receive(b"g", message)
    assert desk.desk.num_open == 0


def test_two_gateways_may_call_requests_alike_and_each_hears_its_own() -> None:
    desk = Desk()
    desk.greet(b"1", b"2")
    desk.desk.receive(b"1", Assign(command(0), 6))
    desk.desk.receive(b"2", Assign(command(1, request_id="r0"), 6))
    desk.steps()
    for identity, number in ((b"1", 0), (b"2", 1)):
        told = desk.events(identity)
        assert {event.request_id for event in told} == {"r0"}
        check_told(replace(asked(number), request_id="r0"), [replace(event, epoch=0) for event in told])
    assert (desk.desk.num_open, desk.desk.num_uncomputed_tokens) == (0, 0)


def test_one_step_is_one_message_for_each_gateway() -> None:
    desk = Desk()
    desk.greet(b"1", b"2")
    for number in range(6):
        desk.desk.receive(b"1" if number < 3 else b"2", Assign(command(number), 6))
    for said in desk.said.values():
        said.clear()
    desk.steps(1)
    assert [len(said) for said in desk.said.values()] == [1, 1]
    assert len({event.request_id for event in desk.events(b"1")}) == 3


@pytest.mark.parametrize("way", ["silent", "gone", "again"])
def test_what_a_gateway_asked_for_ends_when_it_is_silent_gone_or_begins_anew(way: str) -> None:
    desk = Desk()
    desk.greet(b"1", b"2")
    desk.desk.receive(b"1", Assign(command(0, params=ResolvedSampling(max_tokens=50)), 6))
    desk.desk.receive(b"2", Assign(command(1), 6))
    desk.steps(2)
    if way == "silent":
        desk.now_s += MAX_SILENT_S
        desk.desk.receive(b"2", GatewayBeat())
        desk.desk.forget_silent()
        assert desk.desk.num_open == 2, "not yet"
        desk.now_s += 0.5
        desk.desk.forget_silent()
    elif way == "gone":
        desk.gone.add(b"1")
        desk.desk.send_heartbeats()
    else:
        desk.greet(b"1")
    assert desk.desk.num_open == 1
    desk.steps(1)
    assert len(desk.seat.engine.scheduler.live) == 1, "the worker has ended it too"
    desk.steps()
    assert any(isinstance(event, Finished) for event in desk.events(b"2"))
    assert desk.desk.num_uncomputed_tokens == 0
    assert desk.desk.num_gateways == (2 if way == "again" else 1)


def test_a_request_that_comes_again_ends_the_assignment_before_and_nothing_of_it_is_told_as_the_new() -> None:
    desk = Desk()
    desk.greet(b"g")
    desk.desk.receive(b"g", Assign(command(), 6))
    desk.steps(2)
    desk.said[b"g"].clear()
    desk.desk.receive(b"g", Assign(command(epoch=2), 6))
    desk.steps()
    told = desk.events(b"g")
    second = [replace(event, epoch=0) for event in told if event.epoch == 2]
    check_told(asked(0), second)
    assert all(not isinstance(event, Token) for event in told if event.epoch == 1)
    assert desk.desk.num_open == 0


@pytest.mark.parametrize("epoch", [1, 0, -5])
def test_an_assignment_that_was_overtaken_is_dropped(epoch: int) -> None:
    desk = Desk()
    desk.greet(b"g")
    desk.desk.receive(b"g", Assign(command(), 6))
    with raises_code(MessageError, "stale_epoch"):
        desk.desk.receive(b"g", Assign(command(epoch=epoch), 6))
    assert desk.desk.num_open == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"prompt": (1, VOCABULARY)},
        {"prompt": (-1,)},
        {"prompt": (1 << 40,)},
        {"age_s": nan},
        {"age_s": inf},
        {"time_left_s": -inf},
        {"continuations": (Continuation(0), Continuation(0))},
        {"continuations": (Continuation(-1),)},
        {"continuations": (Continuation(99),)},
        {"continuations": ()},
        {"continuations": (Continuation(0, (VOCABULARY,)),)},
        {"continuations": (Continuation(0, (1,) * 59),)},
        {"params": ResolvedSampling(temperature=nan)},
        {"params": ResolvedSampling(temperature=-1.0)},
        {"params": ResolvedSampling(max_tokens=-1)},
        {"params": ResolvedSampling(top_k=-1)},
        {"params": ResolvedSampling(top_p=2.0)},
        {"params": ResolvedSampling(logit_bias=((VOCABULARY, 1.0),))},
        {"params": ResolvedSampling(logit_bias=((1, inf),))},
        {"params": ResolvedSampling(allowed_token_ids=(-3,))},
        {"params": ResolvedSampling(allowed_token_ids=())},
        {"params": ResolvedSampling(banned_token_ids=(1 << 33,))},
        {"params": ResolvedSampling(stop_token_ids=frozenset({-1}))},
        {"params": ResolvedSampling(logprobs=1 << 20)},
        {"params": ResolvedSampling(prompt_logprobs=-1)},
        {"namespace": OTHER_SPACE},
        {"request_id": "x" * 1000},
    ],
    ids=str,
)
def test_a_request_that_no_honest_gateway_makes_is_refused_and_reaches_no_worker(changes: dict[str, Any]) -> None:
    desk = Desk()
    desk.greet(b"g")
    desk.desk.receive(b"g", Assign(command(**changes), 6))
    (event,) = desk.events(b"g")
    assert isinstance(event, Refused)
    assert isinstance(event.error, QuireError)
    assert (event.epoch, desk.desk.num_open, desk.seat.engine.has_work) == (1, 0, False)


def test_what_an_honest_gateway_asks_is_not_refused() -> None:
    desk = Desk()
    desk.greet(b"g")
    params = ResolvedSampling(
        max_tokens=3, min_tokens=30, logit_bias=((1, -5.0),), allowed_token_ids=(1, 2), stop_token_ids=frozenset({4})
    )
    desk.desk.receive(b"g", Assign(command(params=params), 6))
    assert [type(event) for event in desk.events(b"g")] == [Queued]


def test_the_worker_sees_short_names_however_long_the_gateways_are() -> None:
    desk = Desk()
    desk.greet(b"g" * 200)
    desk.desk.receive(b"g" * 200, Assign(command(request_id="x" * 256), 6))
    assert [len(name) < 32 for name in desk.seat.engine.scheduler.live] == [True]


def test_a_farewell_is_heard_when_all_gateways_that_are_there_have_said_so() -> None:
    one = Desk()
    one.greet(b"a", b"b", b"c")
    one.gone.add(b"c")
    one.desk.send_goodbye()
    assert [one.said[name][-1] for name in (b"a", b"b")] == [Goodbye(), Goodbye()]
    assert not one.desk.is_goodbye_acknowledged
    one.desk.receive(b"a", GoodbyeAck())
    assert not one.desk.is_goodbye_acknowledged
    one.desk.receive(b"b", GoodbyeAck())
    assert one.desk.is_goodbye_acknowledged


def test_a_desk_that_drains_says_so_and_refuses_what_is_new() -> None:
    desk = Desk()
    desk.greet(b"g")
    desk.desk.receive(b"g", Assign(command(0), 6))
    desk.said[b"g"].clear()
    desk.desk.drain()
    (beat,) = desk.said[b"g"]
    assert isinstance(beat, MemberBeat)
    assert beat.state == State.DRAINING.value
    desk.desk.receive(b"g", Assign(command(1), 6))
    (refused,) = [event for event in desk.events(b"g") if isinstance(event, Refused)]
    assert isinstance(refused.error, DrainingError)
    desk.steps()
    assert sum(isinstance(event, Finished) for event in desk.events(b"g")) == 1


def test_a_question_about_tokens_that_are_none_is_refused_and_others_are_answered() -> None:
    desk = Desk()
    desk.greet(b"g")
    for call_id, prompt in enumerate(((1, -1), (1, 2))):
        desk.desk.receive(b"g", EngineCall(call_id, Explain(SPACE, prompt)))
    assert [(one.call_id, type(one.result)) for one in desk.said[b"g"] if isinstance(one, CallReply)] == [
        (0, CallError),
        (1, Explained),
    ]
    with raises_code(MessageError, "unsupported_call"):
        desk.desk.receive(b"g", EngineCall(2, GetBlock(1)))


def test_a_reply_is_not_for_the_next_session_of_its_gateway() -> None:
    desk = Desk()
    desk.greet(b"g")
    desk.seat.holds_replies = True
    desk.desk.receive(b"g", EngineCall(1, Explain(SPACE, (1, 2))))
    desk.greet(b"g")
    desk.seat.release_replies()
    assert desk.said[b"g"] == []


def test_reports_count_what_is_still_to_be_computed_and_what_was_heard() -> None:
    desk = Desk()
    desk.greet(b"g")
    desk.desk.receive(b"g", Assign(command(0), 6))
    desk.desk.receive(b"g", Assign(command(1), 1 << 60))
    desk.desk.receive(b"g", Assign(command(2), -7))
    desk.said[b"g"].clear()
    desk.desk.send_heartbeats()
    (beat,) = desk.said[b"g"]
    assert isinstance(beat, MemberBeat)
    assert (beat.report.num_uncomputed_tokens, beat.report.num_received) == (12, 3)
    desk.steps()
    assert desk.desk.num_uncomputed_tokens == 0


def test_a_prompt_that_is_computed_is_reported_at_once_and_steps_that_change_nothing_are_not() -> None:
    desk = Desk()
    desk.greet(b"g")
    desk.desk.receive(b"g", Assign(command(0), 6))  # the clock stands still: no report is due by time
    desk.steps()
    stepped = [one for one in desk.said[b"g"] if isinstance(one, MemberStepped)]
    told = [one.report for one in stepped if one.report is not None]
    first_tokens = [one for one in stepped if any(isinstance(event, FirstToken) for event in one.events)]
    assert [one.report is not None for one in first_tokens] == [True]
    assert told[-1].num_uncomputed_tokens == 0
    assert len(told) < len(stepped)


def test_what_was_cached_is_not_to_be_computed_and_what_a_gateway_leaves_is_not_either() -> None:
    desk = Desk()
    desk.greet(b"g")
    desk.desk.receive(b"g", Assign(command(), 6))
    assert desk.desk.num_uncomputed_tokens == 6
    (name,) = desk.desk.assignments
    desk.desk.on_events([Admitted(name, age_s=0.0, wait_s=0.0, num_cached_tokens=4)])
    assert desk.desk.num_uncomputed_tokens == 2
    desk.desk.forget(b"g")
    assert desk.desk.num_uncomputed_tokens == 0


def test_words_are_sent_to_who_asks() -> None:
    desk = Desk()
    desk.greet(b"g")
    desk.desk.receive(b"g", RequestTextAssets())
    assert desk.said[b"g"] == [WORDS]


def test_two_gateways_before_one_member_are_answered_both_and_one_that_dies_does_not_harm_the_other() -> None:
    fleet = SimulatedFleet(num_gateways=2)
    fleet.join("a")
    first, second = fleet.gateways
    for gateway in (first, second):
        gateway.port.submit(asked(0, max_tokens=20))
    for _ in range(4):
        fleet.step()
    fleet.cut("a", first)
    fleet.step()
    fleet.members["a"].desk.send_heartbeats()
    assert fleet.members["a"].desk.num_gateways == 1
    while second.port.num_open:
        fleet.step()
    check_told(asked(0, max_tokens=20), second.told["r0"])
    assert fleet.members["a"].desk.num_open == 0
