"""A gateway's port: every request is answered once and whole, whatever becomes of the members it is with."""

import dataclasses

import pytest
from msgspec.structs import replace

from quire.backends.oracle import answer_alone
from quire.core.events import (
    Admitted,
    Finished,
    PromptProgress,
    Queued,
    Refused,
    Replayed,
    RequestEvent,
    SequenceFinished,
    Token,
)
from quire.core.request import FinishReason
from quire.engine.calls import BlockInfo, CallReply, Explain, Explained, GetBlock
from quire.engine.commands import Cancel, Restore
from quire.errors import (
    DrainingError,
    EngineDeadError,
    MessageError,
    QueueFullError,
    RequestError,
    RequestTooLargeError,
    TenantShareError,
)
from quire.fleet.gateway.request import QUARANTINE_MESSAGE
from quire.fleet.protocol.messages import (
    PROTOCOL,
    Assign,
    MemberBeat,
    MemberCard,
    MemberReport,
    MemberStepped,
    Welcome,
    decode_to_member,
    encode_fleet_message,
)
from quire.fleet.routing.membership import MemberState
from quire.worker.messages import WorkerLoad
from quire.worker.parent.supervisor import State
from tests.support.errors import raises_code
from tests.support.fleet.desk_fleets import SPACE, SimulatedFleet, asked
from tests.support.workers.lives import VOCABULARY, check_told


def begun(fleet: SimulatedFleet, number: int = 0, *, num_tokens: int = 2, **told: int) -> str:
    """Who has a request that has so many tokens."""
    fleet.port.submit(asked(number, **told))
    for _ in range(20):
        if len(fleet.gateway.tokens(f"r{number}")) >= num_tokens:
            break
        fleet.step()
    member = fleet.gateway.of(f"r{number}")
    assert member is not None
    return member


def other(member: str) -> str:
    return "b" if member == "a" else "a"


def test_progress_of_a_prompt_comes_through_a_gateway_also_from_the_member_that_begins_again() -> None:
    fleet = SimulatedFleet()
    fleet.join("a", "b")
    prompt = tuple(at % VOCABULARY for at in range(48))
    fleet.port.submit(replace(asked(0, max_tokens=1), prompt=prompt, reports_progress=True))

    def reported() -> list[int]:
        events = fleet.gateway.told.get("r0", [])
        return [event.num_computed_tokens for event in events if isinstance(event, PromptProgress)]

    while not reported():
        fleet.step()
    member = fleet.gateway.of("r0")
    assert member is not None
    begun = reported()
    assert 0 < begun[-1] < len(prompt)
    fleet.kill(member)
    fleet.run()
    again = reported()[len(begun) :]
    assert (again[0], again[-1]) == (begun[0], len(prompt))
    assert not any(isinstance(event, PromptProgress) for event in fleet.gateway.told["r0"][-2:])


# -- moves -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 3])
def test_a_stream_goes_on_elsewhere_from_the_next_token(n: int) -> None:
    fleet = SimulatedFleet()
    fleet.join("a", "b")
    first = begun(fleet, n=n)
    fleet.kill(first)
    assert fleet.gateway.of("r0") == other(first)
    fleet.run()
    check_told(asked(0, n=n), fleet.gateway.told["r0"])
    assert fleet.gateway.kinds("r0").count(Replayed) == 1
    assert (fleet.port.counts.num_moved, fleet.port.counts.num_moved_inexact) == (1, 0)
    fleet.check_empty()


def test_what_is_asked_for_again_are_the_tokens_that_the_client_has_not() -> None:
    fleet = SimulatedFleet()
    fleet.join("a", "b")
    first = begun(fleet, num_tokens=3)
    fleet.kill(first)
    (message,) = map(decode_to_member, fleet.gateway.links[other(first)].to_member)
    assert isinstance(message, Assign)
    assert isinstance(message.command, Restore)
    (answer,) = message.command.continuations
    assert list(answer.produced) == fleet.gateway.tokens("r0")
    assert message.command.epoch == 2


def test_a_member_that_is_not_heard_of_for_4_5_s_has_its_streams_taken_and_its_link_broken_off() -> None:
    fleet = SimulatedFleet()
    fleet.join("a", "b")
    first = begun(fleet)
    link = fleet.gateway.links[first]
    fleet.members[first].is_hung = True
    fleet.let_pass(4.25)
    assert fleet.gateway.of("r0") == first
    fleet.let_pass(0.25)
    assert fleet.gateway.of("r0") == other(first)
    assert link.is_over
    fleet.run()
    check_told(asked(0), fleet.gateway.told["r0"])


def test_a_gateway_that_did_not_run_itself_gives_all_members_their_time_anew() -> None:
    fleet = SimulatedFleet()
    fleet.join("a", "b")
    first = begun(fleet)
    fleet.port.tick(fleet.now_s)
    fleet.now_s += 8.0
    fleet.port.tick(fleet.now_s)
    assert fleet.port.num_ready == 2
    assert fleet.gateway.of("r0") == first
    fleet.members[first].is_hung = True
    fleet.let_pass(4.5)
    assert fleet.gateway.of("r0") == other(first)


def test_late_words_of_the_member_before_reach_nobody() -> None:
    fleet = SimulatedFleet()
    fleet.join("a", "b")
    first = begun(fleet)
    said = fleet.stepped(first)
    fleet.kill(first)
    fleet.join(first)
    fleet.step(other(first))
    before = [*fleet.gateway.told["r0"]]
    for address in (first, other(first)):
        for message in said:
            fleet.port.receive(fleet.gateway.links[address], MemberStepped(message.events))
    assert fleet.gateway.told["r0"] == before
    fleet.run()
    check_told(asked(0), fleet.gateway.told["r0"])


def test_a_request_that_comes_back_to_a_member_does_not_hear_what_that_one_said_of_it_before() -> None:
    fleet = SimulatedFleet()
    fleet.join("a")
    begun(fleet)
    said = fleet.stepped("a")
    fleet.meet("a")
    fleet.talk()
    assert fleet.gateway.of("r0") == "a"
    before = [*fleet.gateway.told["r0"]]
    flight = fleet.port.in_flight["r0"]
    assert not flight.is_running
    for message in said:
        fleet.port.receive(fleet.gateway.links["a"], MemberStepped(message.events))
    assert fleet.gateway.told["r0"] == before
    assert not flight.is_running, "an old admission is none"
    fleet.run()
    check_told(asked(0), fleet.gateway.told["r0"])
    fleet.check_empty()


def test_bits_that_would_be_the_same_come_first_and_others_are_counted() -> None:
    fleet = SimulatedFleet()
    fleet.join("a", exactness="avx")
    first = begun(fleet)
    fleet.join("b", exactness="sve")
    fleet.join("c", exactness="avx")
    fleet.kill(first)
    assert fleet.gateway.of("r0") == "c"
    assert fleet.port.counts.num_moved_inexact == 0
    fleet.step()
    fleet.kill("c")
    assert fleet.gateway.of("r0") == "b"
    assert (fleet.port.counts.num_moved, fleet.port.counts.num_moved_inexact) == (2, 1)
    fleet.run()


def test_members_that_cannot_tell_their_bits_are_all_different() -> None:
    fleet = SimulatedFleet()
    fleet.join("a", "b", exactness="")
    fleet.kill(begun(fleet))
    assert fleet.port.counts.num_moved_inexact == 1
    fleet.run()


def test_a_request_without_a_token_goes_to_anybody() -> None:
    fleet = SimulatedFleet()
    fleet.join("a", exactness="avx")
    fleet.port.submit(asked(0))
    fleet.join("b", exactness="sve")
    fleet.kill("a")
    assert fleet.port.counts.num_moved_inexact == 0
    fleet.run()


def test_two_members_that_fall_silent_together_do_not_get_each_others_streams() -> None:
    fleet = SimulatedFleet()
    fleet.join("a", "b")
    begun(fleet, 0)
    begun(fleet, 1)
    for member in fleet.members.values():
        member.is_hung = True
    fleet.let_pass(4.5)
    assert fleet.port.num_held == 2
    assert fleet.port.counts.num_moved == 0, "nobody has them yet"
    fleet.join("c")
    assert fleet.port.counts.num_moved == 2
    fleet.run()
    for number in (0, 1):
        check_told(asked(number), fleet.gateway.told[f"r{number}"])


# -- cancels -----------------------------------------------------------------------------------------------------------


def test_a_request_that_is_held_ends_at_once_when_its_client_leaves() -> None:
    fleet = SimulatedFleet()
    fleet.join("a")
    begun(fleet)
    fleet.kill("a")
    fleet.port.cancel("r0")
    assert [end.reason for end in fleet.gateway.ends("r0")] == [FinishReason.CANCELLED]
    assert fleet.gateway.kinds("r0")[-1] is Finished
    fleet.check_empty()


def test_a_cancel_whose_member_dies_before_it_hears_of_it_ends_the_request() -> None:
    fleet = SimulatedFleet()
    fleet.join("a", "b")
    first = begun(fleet)
    fleet.port.cancel("r0")
    assert fleet.gateway.kinds("r0")[-1] is not Finished
    fleet.kill(first)
    assert [end.reason for end in fleet.gateway.ends("r0")] == [FinishReason.CANCELLED]
    assert fleet.port.counts.num_moved == 0
    fleet.check_empty()


def test_a_request_that_moves_and_is_cancelled_is_ended_where_it_is_now() -> None:
    fleet = SimulatedFleet()
    fleet.join("a", "b")
    first = begun(fleet)
    fleet.kill(first)
    fleet.port.cancel("r0")
    sent = [decode_to_member(data) for data in fleet.gateway.links[other(first)].to_member]
    assert [type(one) for one in sent] == [Assign, Cancel]
    fleet.run()
    assert [end.reason for end in fleet.gateway.ends("r0")] == [FinishReason.CANCELLED]
    fleet.check_empty()


def test_one_of_three_answers_that_has_all_it_wants_is_never_asked_for_again() -> None:
    fleet = SimulatedFleet()
    fleet.join("a", "b")
    first = begun(fleet, n=3)
    fleet.port.cancel("r0", 1)
    assert [end.sequence_index for end in fleet.gateway.ends("r0")] == [1]
    had = fleet.gateway.tokens("r0", 1)
    fleet.kill(first)
    fleet.run()
    check_told(asked(0, n=3), fleet.gateway.told["r0"], whole=False)
    assert fleet.gateway.tokens("r0", 1) == had
    for index in (0, 2):
        alone = answer_alone(asked(0).prompt, asked(0).params, 0, VOCABULARY, index)
        assert fleet.gateway.tokens("r0", index) == alone
    fleet.check_empty()


def test_all_answers_ended_one_by_one_end_the_request() -> None:
    fleet = SimulatedFleet()
    fleet.join("a")
    begun(fleet, n=2)
    for index in (0, 1):
        fleet.port.cancel("r0", index)
    fleet.run()
    assert [end.reason for end in fleet.gateway.ends("r0")] == [FinishReason.CANCELLED] * 2
    fleet.check_empty()


def test_who_is_unknown_is_cancelled_without_a_word() -> None:
    fleet = SimulatedFleet()
    fleet.join("a")
    fleet.port.cancel("nobody")
    assert fleet.gateway.told == {}


# -- refusals ----------------------------------------------------------------------------------------------------------


def test_a_member_without_room_is_not_asked_twice_and_another_one_answers() -> None:
    fleet = SimulatedFleet()
    fleet.join("a", "b")
    fleet.members["a"].seat.refusal = QueueFullError(5, 5)
    for number in range(4):
        fleet.port.submit(asked(number))
    fleet.run()
    for number in range(4):
        check_told(asked(number), fleet.gateway.told[f"r{number}"])
    assert fleet.port.counts.num_moved == 0
    fleet.check_empty()


@pytest.mark.parametrize(("num_members", "num_asked"), [(1, 1), (2, 2), (4, 4), (6, 4)])
def test_the_client_is_told_when_three_others_have_no_room_either_with_the_shortest_wait(
    num_members: int, num_asked: int
) -> None:
    fleet = SimulatedFleet()
    names = "abcdef"[:num_members]
    fleet.join(*names)
    for at, name in enumerate(names):
        fleet.members[name].seat.refusal = QueueFullError(5, 5, retry_after_s=20 - at)
    fleet.port.submit(asked(0))
    fleet.talk()
    (event,) = fleet.gateway.told["r0"]
    assert isinstance(event, Refused)
    assert isinstance(event.error, QueueFullError)
    asked_s = [20 - names.index(one) for one in names if fleet.stepped(one)]
    assert len(asked_s) == num_asked
    assert event.error.retry_after_s == min(asked_s)
    fleet.check_empty()


def test_a_tenants_share_is_full_at_one_member_and_not_at_another() -> None:
    fleet = SimulatedFleet()
    fleet.join("a", "b")
    fleet.members["a"].seat.refusal = TenantShareError("default", 3, 3)
    for number in range(2):
        fleet.port.submit(asked(number))
    fleet.run()
    assert all(Refused not in fleet.gateway.kinds(f"r{number}") for number in range(2))


@pytest.mark.parametrize("error", [DrainingError("going down"), EngineDeadError("gone")])
def test_a_request_that_only_members_on_their_way_out_could_have_taken_waits_for_the_next(error: DrainingError) -> None:
    fleet = SimulatedFleet()
    fleet.join("a")
    fleet.members["a"].seat.refusal = error
    fleet.port.submit(asked(0))
    fleet.talk()
    assert fleet.gateway.told == {}
    assert fleet.port.num_held == 1
    fleet.join("b")
    fleet.run()
    check_told(asked(0), fleet.gateway.told["r0"])


def test_a_stream_in_the_middle_of_its_answer_is_never_sent_away() -> None:
    fleet = SimulatedFleet()
    fleet.join("a", "b")
    first = begun(fleet)
    fleet.members[other(first)].seat.refusal = QueueFullError(5, 5)
    fleet.kill(first)
    fleet.talk()
    assert fleet.port.num_held == 1
    fleet.let_pass(1.0)
    assert fleet.port.num_held + len(fleet.gateway.links[other(first)].to_member) >= 1
    fleet.members[other(first)].seat.refusal = None
    fleet.let_pass(0.25)
    fleet.run()
    check_told(asked(0), fleet.gateway.told["r0"])
    fleet.check_empty()


def test_a_request_that_is_turned_away_after_its_client_had_all_it_wanted_is_over() -> None:
    fleet = SimulatedFleet()
    fleet.join("a", "b")
    for member in fleet.members.values():
        member.seat.refusal = DrainingError("going down")
    fleet.port.submit(asked(0))
    fleet.port.cancel("r0", 0)
    fleet.talk()
    assert fleet.gateway.kinds("r0") == [SequenceFinished, Finished]
    fleet.check_empty()


def test_a_request_that_no_member_could_serve_is_refused_by_the_first() -> None:
    fleet = SimulatedFleet()
    fleet.join("a", "b")
    for member in fleet.members.values():
        member.seat.refusal = RequestTooLargeError("too long")
    fleet.port.submit(asked(0))
    fleet.talk()
    (event,) = fleet.gateway.told["r0"]
    assert isinstance(event, Refused)
    assert sum(bool(fleet.stepped(one)) for one in "ab") == 1
    fleet.check_empty()


def test_members_with_shorter_sequences_get_what_fits_and_the_rest_waits_for_a_longer_one() -> None:
    fleet = SimulatedFleet()
    fleet.start("small", max_sequence_tokens=8)
    fleet.start("large")
    for address in ("small", "large"):
        fleet.meet(address)
    fleet.talk()
    fleet.port.submit(asked(0, max_tokens=20))
    while len(fleet.gateway.tokens("r0")) < 4:
        if fleet.gateway.of("r0") == "small":
            fleet.kill("small")
            fleet.start("small", max_sequence_tokens=8)
        fleet.step()
    fleet.meet("small")
    fleet.talk()
    fleet.kill("large")
    assert fleet.port.num_held == 1, "it has more tokens than the small one could hold"
    fleet.join("large")
    fleet.run()
    check_told(asked(0, max_tokens=20), fleet.gateway.told["r0"])


def test_what_only_one_member_can_do_waits_while_its_worker_is_replaced_and_not_while_it_drains() -> None:
    fleet = SimulatedFleet()
    fleet.start("small", max_sequence_tokens=4)
    fleet.start("large")
    for address in ("small", "large"):
        fleet.meet(address)
    fleet.talk()
    large = fleet.members["large"]
    large.seat.state = State.RESTARTING
    large.desk.send_heartbeats()
    fleet.talk()
    fleet.port.submit(asked(0))
    assert fleet.port.num_held == 1
    large.seat.state = State.READY
    large.desk.send_heartbeats()
    fleet.talk()
    assert fleet.gateway.of("r0") == "large"
    fleet.run()
    check_told(asked(0), fleet.gateway.told["r0"])
    large.desk.drain()
    fleet.members["small"].seat.refusal = RequestTooLargeError("too long")
    fleet.talk()
    fleet.port.submit(asked(1))
    fleet.talk()
    assert fleet.gateway.kinds("r1") == [Refused]
    fleet.check_empty()


@pytest.mark.parametrize("late", [Refused.of("r0", QueueFullError(1, 1), 1), Replayed("r0", epoch=1)])
def test_what_is_said_of_an_assignment_that_is_over_changes_nothing_though_the_member_is_the_same(
    late: RequestEvent,
) -> None:
    fleet = SimulatedFleet()
    fleet.join("a")
    begun(fleet)
    fleet.kill("a")
    fleet.join("a")
    told = len(fleet.gateway.told["r0"])
    fleet.port.receive(fleet.gateway.links["a"], MemberStepped((late,)))
    assert fleet.gateway.told["r0"][told:] == []
    assert fleet.port.in_flight["r0"].entry.epoch == 2
    fleet.run()
    check_told(asked(0), fleet.gateway.told["r0"])
    fleet.check_empty()


def test_who_does_not_have_a_request_cannot_end_it() -> None:
    fleet = SimulatedFleet()
    fleet.join("a", "b")
    first = begun(fleet)
    epoch = fleet.port.in_flight["r0"].entry.epoch
    assert epoch is not None
    refused = Refused.of("r0", RequestError("not mine"), epoch)
    fleet.port.receive(fleet.gateway.links[other(first)], MemberStepped((refused,)))
    fleet.run()
    check_told(asked(0), fleet.gateway.told["r0"])


def test_the_bits_that_a_stream_goes_on_with_are_those_it_began_with_wherever_it_was_since() -> None:
    fleet = SimulatedFleet()
    fleet.join("a", exactness="one")
    begun(fleet)
    fleet.join("b", exactness="another")
    fleet.kill("a")
    while len(fleet.gateway.tokens("r0")) < 4:
        fleet.step()
    fleet.join("c", exactness="another")
    fleet.join("d", exactness="one")
    fleet.kill("b")
    assert fleet.gateway.of("r0") == "d"
    assert (fleet.port.counts.num_moved, fleet.port.counts.num_moved_inexact) == (2, 1)


def test_members_call_a_model_by_what_it_computes_whatever_a_gateway_calls_it() -> None:
    fleet = SimulatedFleet()
    fleet.join("a", model="weights")
    fleet.port.submit(asked(0))
    fleet.talk()
    fleet.run()
    assert fleet.gateway.kinds("r0")[-1] is Finished


def test_who_waits_for_a_member_that_does_not_come_back_is_told_why_nobody_else_can() -> None:
    fleet = SimulatedFleet()
    for address, room in (("small", 4), ("large", 64)):
        fleet.start(address, max_sequence_tokens=room)
        fleet.meet(address)
    fleet.talk()
    fleet.members["small"].seat.refusal = RequestTooLargeError("too long")
    fleet.members["large"].seat.state = State.RESTARTING
    fleet.members["large"].desk.send_heartbeats()
    fleet.talk()
    fleet.port.submit(asked(0))
    assert fleet.port.num_held == 1
    fleet.kill("large")
    fleet.let_pass(1.0)
    assert fleet.gateway.kinds("r0") == [Refused]
    fleet.check_empty()


def test_a_gateway_that_goes_down_takes_nothing_new_and_ends_what_it_has() -> None:
    fleet = SimulatedFleet()
    fleet.join("a")
    begun(fleet)
    fleet.port.is_draining = True
    fleet.port.submit(asked(1))
    (event,) = fleet.gateway.told["r1"]
    assert isinstance(event, Refused)
    assert isinstance(event.error, DrainingError)
    fleet.run()
    check_told(asked(0), fleet.gateway.told["r0"])


def test_where_nobody_is_there_only_so_many_are_held() -> None:
    fleet = SimulatedFleet(max_held=2)
    for number in range(3):
        fleet.port.submit(asked(number))
    (event,) = fleet.gateway.told["r2"]
    assert isinstance(event, Refused)
    assert isinstance(event.error, QueueFullError)
    fleet.join("a")
    fleet.run()
    for number in range(2):
        check_told(asked(number), fleet.gateway.told[f"r{number}"])


def test_a_request_that_is_held_beyond_its_deadline_ends_with_what_it_has() -> None:
    fleet = SimulatedFleet()
    fleet.join("a")
    begun(fleet, deadline_s=3)
    had = fleet.gateway.tokens("r0")
    fleet.kill("a")
    fleet.let_pass(2.75)
    assert fleet.gateway.ends("r0") == []
    fleet.let_pass(0.25)
    assert [(end.reason, end.num_output_tokens) for end in fleet.gateway.ends("r0")] == [
        (FinishReason.DEADLINE, len(had))
    ]
    fleet.check_empty()


# -- quarantine --------------------------------------------------------------------------------------------------------


def prefilling(fleet: SimulatedFleet, number: int) -> None:
    """One step, of which nothing but the admission was heard."""
    port, flight = fleet.port, fleet.port.in_flight[f"r{number}"]
    assert flight.member is not None
    fleet.talk()
    epoch = flight.entry.epoch or 0
    (event,) = [
        event
        for message in fleet.stepped(flight.member)
        for event in message.events
        if isinstance(event, Queued) and (event.request_id, event.epoch) == (f"r{number}", epoch)
    ]
    link = fleet.gateway.links[flight.member]
    port.receive(link, MemberStepped((Admitted(event.request_id, 0.0, 0.0, 0, epoch=epoch),)))


def test_a_request_that_ran_on_three_members_that_died_is_ended_with_an_error_of_its_own() -> None:
    fleet = SimulatedFleet()
    fleet.join("a", "b", "c", "d")
    fleet.port.submit(asked(0))
    for at in range(3):
        assert fleet.gateway.ends("r0") == [], at
        prefilling(fleet, 0)
        fleet.kill(fleet.gateway.of("r0") or "")
    assert [(end.reason, end.error) for end in fleet.gateway.ends("r0")] == [(FinishReason.ERROR, QUARANTINE_MESSAGE)]
    assert fleet.gateway.kinds("r0")[-1] is Finished
    counts = fleet.port.counts
    assert (counts.num_moved, counts.num_quarantined) == (2, 1)
    assert len(fleet.members) == 1, "the fourth never heard of it"
    fleet.check_empty()


def test_a_token_between_two_deaths_is_a_new_beginning() -> None:
    fleet = SimulatedFleet()
    fleet.join(*"abcdefg")
    fleet.port.submit(asked(0, max_tokens=12))
    for _ in range(5):
        fleet.step()
        fleet.kill(fleet.gateway.of("r0") or "")
    fleet.run()
    check_told(asked(0, max_tokens=12), fleet.gateway.told["r0"])


def test_who_only_waited_where_members_died_is_no_suspect() -> None:
    fleet = SimulatedFleet()
    fleet.join(*"abcdef")
    fleet.port.submit(asked(0))
    for _ in range(5):
        fleet.talk()
        fleet.kill(fleet.gateway.of("r0") or "")
    fleet.run()
    check_told(asked(0), fleet.gateway.told["r0"])
    assert fleet.port.counts.num_quarantined == 0


def test_waiting_or_being_turned_away_between_two_deaths_is_no_pardon() -> None:
    fleet = SimulatedFleet()
    fleet.join(*"abcdefg")
    fleet.port.submit(asked(0))
    for _ in range(2):
        prefilling(fleet, 0)
        fleet.kill(fleet.gateway.of("r0") or "")
        fleet.kill(fleet.gateway.of("r0") or "")  # it waited there
    fleet.members[fleet.gateway.of("r0") or ""].seat.refusal = QueueFullError(5, 5)
    fleet.talk()
    prefilling(fleet, 0)
    fleet.kill(fleet.gateway.of("r0") or "")
    assert [end.error for end in fleet.gateway.ends("r0")] == [QUARANTINE_MESSAGE]
    fleet.check_empty()


# -- members -----------------------------------------------------------------------------------------------------------


def test_a_member_whose_worker_is_replaced_keeps_its_streams_and_gets_nothing_new_meanwhile() -> None:
    fleet = SimulatedFleet()
    fleet.join("a", "b")
    first = begun(fleet)
    member = fleet.members[first]
    member.seat.state = State.RESTARTING
    member.desk.send_heartbeats()
    fleet.talk()
    assert fleet.port.router.membership.state_of(first) is MemberState.SUSPECT
    name = next(iter(member.desk.assignments))
    member.desk.on_events([Replayed(name)])
    fleet.talk()
    assert fleet.gateway.of("r0") == first
    assert not fleet.port.in_flight["r0"].is_running
    fleet.port.submit(asked(1))
    assert fleet.gateway.of("r1") == other(first)
    member.seat.state = State.READY
    member.desk.send_heartbeats()
    fleet.talk()
    assert fleet.port.num_ready == 2
    fleet.run()
    check_told(asked(0), fleet.gateway.told["r0"])
    assert fleet.gateway.kinds("r0").count(Replayed) == 1


def test_a_worker_that_takes_long_to_replace_has_its_streams_moved_and_the_member_comes_back() -> None:
    fleet = SimulatedFleet()
    fleet.join("a", "b")
    first = begun(fleet)
    fleet.members[first].seat.state = State.RESTARTING
    fleet.let_pass(5.0)
    assert fleet.gateway.of("r0") == other(first)
    fleet.meet(first)
    fleet.let_pass(20.0)
    assert fleet.port.router.membership.state_of(first) is MemberState.JOINING, "it is alive, and loads"
    fleet.members[first].seat.state = State.READY
    fleet.let_pass(1.0)
    assert fleet.port.num_ready == 2
    fleet.run()
    fleet.check_empty()


def test_a_member_that_drains_ends_what_it_has_gets_nothing_new_and_keeps_its_link() -> None:
    fleet = SimulatedFleet()
    fleet.join("a", "b")
    first = begun(fleet)
    link = fleet.gateway.links[first]
    fleet.members[first].desk.drain()
    fleet.talk()
    assert fleet.port.router.membership.state_of(first) is MemberState.DRAINING
    for number in range(1, 5):
        fleet.port.submit(asked(number))
        assert fleet.gateway.of(f"r{number}") == other(first)
    fleet.run()
    assert first not in fleet.port.members
    assert not link.is_over, "to meet it again and again would say nothing new"
    fleet.let_pass(3.0)
    assert not link.is_over
    fleet.kill(first)
    for number in range(5):
        check_told(asked(number), fleet.gateway.told[f"r{number}"])
    assert fleet.port.counts.num_moved == 0
    fleet.check_empty()


def test_what_was_on_its_way_to_a_member_that_drains_goes_to_another() -> None:
    fleet = SimulatedFleet()
    fleet.join("a", "b")
    for number in range(4):
        fleet.port.submit(asked(number))
    fleet.members["a"].desk.drain()
    fleet.run()
    for number in range(4):
        check_told(asked(number), fleet.gateway.told[f"r{number}"])
    assert "a" not in fleet.port.members
    fleet.check_empty()


def test_a_member_of_another_model_is_not_let_in() -> None:
    fleet = SimulatedFleet()
    fleet.join("a")
    fleet.start("b", model="another")
    link = fleet.meet("b")
    fleet.talk()
    assert "another" in link.why
    assert fleet.port.members.keys() == {"a"}


def test_a_first_member_that_is_turned_away_does_not_say_what_the_fleet_computes() -> None:
    fleet = SimulatedFleet()
    fleet.start("b", max_sequence_tokens=0)
    link = fleet.meet("b")
    fleet.talk()
    assert link.is_over
    assert fleet.port.info is None


@pytest.mark.parametrize(
    "lie",
    [
        MemberStepped((Token("r0", 0, 1, 99, None, epoch=1),)),
        MemberStepped((Token("r0", 0, VOCABULARY, 3, None, epoch=1),)),
        MemberStepped((Token("r0", 0, 1, 3, None, epoch=7),)),
        MemberStepped((Finished("r0", 6, 0, 3, epoch=1),)),
        MemberStepped((SequenceFinished("r0", 0, FinishReason.CANCELLED, 2, None, epoch=1),)),
        MemberStepped((Refused("r0", "KeyError", (), epoch=1),)),
        MemberStepped((), MemberReport(WorkerLoad(), 0, 99)),
        MemberBeat("ready", MemberReport(WorkerLoad(), 0, 0)),
    ],
)
def test_a_member_that_lies_loses_its_link_and_its_streams_are_not_harmed(lie: MemberStepped | MemberBeat) -> None:
    fleet = SimulatedFleet()
    fleet.join("a", "b")
    first = begun(fleet)
    link = fleet.gateway.links[first]
    fleet.members[first].desk.send_heartbeats()
    fleet.talk()
    link.to_gateway.append(encode_fleet_message(lie))
    fleet.talk()
    assert link.is_over
    assert fleet.gateway.of("r0") == other(first)
    fleet.run()
    check_told(asked(0), fleet.gateway.told["r0"])


def test_a_member_that_says_welcome_twice_lies() -> None:
    fleet = SimulatedFleet()
    fleet.join("a")
    link = fleet.gateway.links["a"]
    card = fleet.port.members["a"].card
    link.to_gateway.append(encode_fleet_message(Welcome(1, card)))
    fleet.talk()
    assert link.is_over
    assert fleet.port.members == {}


def test_a_member_started_again_at_its_address_is_another_life_with_nothing_in_its_cache() -> None:
    fleet = SimulatedFleet()
    fleet.join("a")
    fleet.port.submit(asked(0))
    fleet.run()
    life = fleet.port.members["a"].card.incarnation
    fleet.kill("a")
    fleet.join("a")
    assert fleet.port.members["a"].card.incarnation != life
    choice = fleet.port.router.best(fleet.port._members.routed_prompt("q", SPACE, asked(0).prompt, {}))
    assert choice is not None
    assert choice.num_cached_tokens == 0
    fleet.check_empty()


def test_the_end_of_a_link_of_before_takes_nothing_from_the_member_that_is_there_now() -> None:
    fleet = SimulatedFleet()
    fleet.join("a")
    before = fleet.gateway.links["a"]
    fleet.kill("a")
    fleet.join("a")
    fleet.port.handle_loss(before, "once more")
    assert fleet.port.num_ready == 1


@pytest.mark.parametrize("num_more", [-1, 1])
def test_a_member_with_other_tokens_is_not_let_in(num_more: int) -> None:
    fleet = SimulatedFleet()
    fleet.join("a")
    card = fleet.port.members["a"].card
    info = dataclasses.replace(card.info, vocabulary_size=card.info.vocabulary_size + num_more)
    fleet.start("b")
    link = fleet.meet("b")
    with raises_code(MessageError, "another_vocabulary_size"):
        fleet.port.receive(link, Welcome(PROTOCOL, MemberCard("oracle", info, "other")))
    assert fleet.port.members.keys() == {"a"}


def test_a_gateway_that_did_not_run_trusts_no_member_again_that_it_had_doubts_of() -> None:
    fleet = SimulatedFleet()
    fleet.join("a", "b")
    first = begun(fleet)
    fleet.port.tick(fleet.now_s)
    fleet.members[first].seat.state = State.RESTARTING
    fleet.members[first].desk.send_heartbeats()
    fleet.talk()
    fleet.now_s += 8.0
    fleet.port.tick(fleet.now_s)
    assert fleet.port.router.membership.state_of(first) is MemberState.GONE
    assert fleet.gateway.of("r0") == other(first)


def test_what_a_member_has_not_heard_of_stays_counted_after_its_report() -> None:
    fleet = SimulatedFleet()
    fleet.join("a")
    fleet.port.submit(asked(0))
    assert fleet.port.router.loads.in_flight_tokens == {"a": 6}
    fleet.now_s += 1.0
    report = MemberReport(WorkerLoad(), 0, 0)
    fleet.port.receive(fleet.gateway.links["a"], MemberBeat("ready", report))
    assert fleet.port.router.loads.in_flight_tokens == {"a": 6}, "it is on its way"
    fleet.talk()
    fleet.members["a"].desk.send_heartbeats()
    fleet.talk()
    assert fleet.port.router.loads.in_flight_tokens == {"a": 6}, "as the member says"
    fleet.run()
    fleet.members["a"].desk.send_heartbeats()
    fleet.talk()
    assert fleet.port.router.loads.in_flight_tokens == {"a": 0}


# -- questions and clears ----------------------------------------------------------------------------------------------


def test_a_question_is_answered_by_the_member_that_would_get_the_prompt() -> None:
    fleet = SimulatedFleet()
    fleet.join("a", "b")
    fleet.port.submit(asked(0, max_tokens=3))
    holder = fleet.gateway.of("r0")
    fleet.run()
    replies: list[object] = []
    fleet.port.call(Explain(SPACE, asked(0).prompt), replies.append)
    assert [address for address, known in fleet.port.members.items() if len(known.calls)] == [holder]
    fleet.talk()
    (reply,) = replies
    assert isinstance(reply, Explained)
    assert reply.divergence.num_cached_tokens == 4
    fleet.check_empty()


def test_a_question_whose_member_dies_or_is_not_there_is_told_so() -> None:
    fleet = SimulatedFleet()
    replies: list[object] = []
    fleet.port.call(Explain(SPACE, (1, 2)), replies.append)
    fleet.join("a", "b")
    fleet.port.call(Explain(SPACE, (1, 2)), replies.append)
    fleet.kill("a")
    fleet.kill("b")
    fleet.port.call(GetBlock(1), replies.append)
    assert [type(reply) for reply in replies] == [EngineDeadError] * 3


def test_a_reply_that_no_call_waits_for_ends_the_link_and_a_closed_gateway_ends_its_calls() -> None:
    fleet = SimulatedFleet()
    fleet.join("a")
    replies: list[object] = []
    fleet.port.call(Explain(SPACE, (1, 2)), replies.append)
    with raises_code(MessageError, "malformed_message"):
        fleet.port.receive(fleet.gateway.links["a"], CallReply.of(7, BlockInfo(None)))
    fleet.port.abandon("closed")
    assert [type(reply) for reply in replies] == [EngineDeadError]
    fleet.check_empty()


def test_a_clear_reaches_all_members() -> None:
    fleet = SimulatedFleet()
    fleet.join("a", "b")
    fleet.port.clear_cache()
    fleet.talk()
    assert [member.seat.num_clears for member in fleet.members.values()] == [1, 1]


def test_a_port_that_is_abandoned_tells_who_waits_and_keeps_nothing() -> None:
    fleet = SimulatedFleet()
    fleet.join("a")
    begun(fleet, 0)
    fleet.port.submit(asked(1))
    fleet.port.abandon("closed")
    assert fleet.gateway.kinds("r1") == [Refused]
    assert fleet.port.num_open == 0
    assert fleet.port.router.routed == {}


def test_a_prompt_without_a_token_is_refused_and_not_a_bug() -> None:
    fleet = SimulatedFleet()
    fleet.join("a")
    fleet.port.submit(replace(asked(0), prompt=()))
    fleet.talk()
    (event,) = fleet.gateway.told["r0"]
    assert isinstance(event, Refused)
    assert isinstance(event.error, RequestTooLargeError)
