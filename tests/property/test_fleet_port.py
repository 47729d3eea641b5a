"""A gateway and its members, whatever comes in whatever order: every client hears its whole answer once.

Members join, die, hang, are cut off, come back, turn requests away, drain and lie; messages are delayed, lost with
their links, and said again. In the end everybody is well, and then nothing is left behind.
"""

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from quire.core.events import Finished, Refused, RequestEvent, SequenceFinished, Token
from quire.core.request import FinishReason, Request
from quire.errors import DrainingError, QueueFullError
from quire.fleet.gateway.request import QUARANTINE_MESSAGE
from quire.fleet.protocol.messages import MemberStepped
from tests.support.fleet.desk_fleets import SimulatedFleet, SimulatedGateway, asked
from tests.support.workers.lives import check_told

ADDRESSES = ("a", "b", "c", "d")
addresses = st.sampled_from(ADDRESSES)
MOST_REQUESTS = 12


class FleetMachine(RuleBasedStateMachine):
    """Two gateways before up to four members."""

    def __init__(self) -> None:
        super().__init__()
        self.fleet = SimulatedFleet(num_gateways=2)
        self.asked: dict[str, tuple[SimulatedGateway, Request]] = {}
        self.cancelled: set[str] = set()

    @initialize(num_members=st.integers(0, 4))
    def begin(self, num_members: int) -> None:
        """Most interesting things happen to fleets that are there."""
        self.fleet.join(*ADDRESSES[:num_members])
        for number in range(3):
            self.submit(number % 2, 1 + number % 2, 6)

    # -- clients -------------------------------------------------------------------------------------------------------

    @precondition(lambda self: len(self.asked) < MOST_REQUESTS)
    @rule(gateway=st.integers(0, 1), n=st.sampled_from((1, 1, 3)), max_tokens=st.integers(1, 9))
    def submit(self, gateway: int, n: int, max_tokens: int) -> None:
        one = asked(len(self.asked), n=n, max_tokens=max_tokens)
        self.asked[one.request_id] = (self.fleet.gateways[gateway], one)
        self.fleet.gateways[gateway].port.submit(one)

    @precondition(lambda self: self.asked)
    @rule(data=st.data(), answer=st.sampled_from((None, None, 0, 2)))
    def cancel(self, data: st.DataObject, answer: int | None) -> None:
        name = data.draw(st.sampled_from(sorted(self.asked)))
        self.cancelled.add(name)
        self.asked[name][0].port.cancel(name, answer)

    # -- members -------------------------------------------------------------------------------------------------------

    @rule(address=addresses)
    def start_or_kill(self, address: str) -> None:
        if address in self.fleet.members:
            self.fleet.kill(address)
        else:
            self.fleet.start(address)

    @rule(address=addresses, gateway=st.integers(0, 1))
    def meet_or_cut(self, address: str, gateway: int) -> None:
        its = self.fleet.gateways[gateway]
        if address in its.links:
            self.fleet.cut(address, its)
        elif address in self.fleet.members and not self.fleet.members[address].desk.is_draining:
            self.fleet.meet(address, its)

    @rule(address=addresses)
    def hang_or_wake(self, address: str) -> None:
        if address in self.fleet.members:
            self.fleet.members[address].is_hung ^= True

    @rule(address=addresses, error=st.sampled_from((None, QueueFullError(1, 1), DrainingError("later"))))
    def turn_away(self, address: str, error: QueueFullError | DrainingError | None) -> None:
        if address in self.fleet.members:
            self.fleet.members[address].seat.refusal = error

    @rule(address=addresses)
    def drain(self, address: str) -> None:
        if address in self.fleet.members:
            self.fleet.members[address].desk.drain()

    # -- time, and what is on its way ----------------------------------------------------------------------------------

    @rule(address=addresses, num_steps=st.integers(1, 3))
    def step(self, address: str, num_steps: int) -> None:
        member = self.fleet.members.get(address)
        if member is not None and not member.is_hung:
            for _ in range(num_steps):
                member.seat.step()

    @rule(address=addresses, gateway=st.integers(0, 1), num_most=st.integers(1, 3))
    def deliver(self, address: str, gateway: int, num_most: int) -> None:
        its = self.fleet.gateways[gateway]
        if address in its.links:
            self.fleet.deliver(its.links[address], its, num_most)

    @rule()
    def deliver_all_and_step(self) -> None:
        self.fleet.step()

    @rule(quarters=st.sampled_from((1, 4, 20, 45)))
    def wait(self, quarters: int) -> None:
        self.fleet.let_pass(quarters / 4)

    @precondition(lambda self: self.fleet.said)
    @rule(data=st.data(), gateway=st.integers(0, 1))
    def say_again(self, data: st.DataObject, gateway: int) -> None:
        """Any words of any life of a member, over any link. Those of an assignment that lives make the link a liar."""
        its = self.fleet.gateways[gateway]
        if not its.links:
            return
        _, message = data.draw(st.sampled_from(self.fleet.said))
        link = its.links[data.draw(st.sampled_from(sorted(its.links)))]
        if isinstance(message, MemberStepped):
            self.fleet.hear(its, link, MemberStepped(message.events))

    # -- what must hold ------------------------------------------------------------------------------------------------

    def teardown(self) -> None:
        """All is well from now on: everybody gets an answer."""
        for address in list(self.fleet.members):
            self.fleet.kill(address)
        self.fleet.join("a", "b")
        self.fleet.let_pass(1.0)
        self.fleet.run()
        self.fleet.check_empty()
        for name, (gateway, request) in self.asked.items():
            check_heard(request, gateway.told[name], is_cancelled=name in self.cancelled)


def check_heard(request: Request, told: list[RequestEvent], *, is_cancelled: bool) -> None:
    """One last event, and before it what the request is answered alone; or its beginning, if there is a reason."""
    num_last = Counter(type(event) for event in told)
    if num_last[Refused]:
        assert isinstance(told[-1], Refused)
        assert num_last[Refused] == 1
        assert (num_last[Finished], num_last[Token]) == (0, 0), "whoever has begun is never sent away"
        return
    ends = [event for event in told if isinstance(event, SequenceFinished)]
    is_poison = [end.error for end in ends if end.error] == [QUARANTINE_MESSAGE] * len(request.continuations)
    if not is_cancelled and not is_poison:
        assert {end.reason for end in ends} <= {FinishReason.LENGTH, FinishReason.STOP}
    check_told(request, told, whole=not is_cancelled and not is_poison)


TestFleets = FleetMachine.TestCase
TestFleets.settings = settings(stateful_step_count=60, deadline=None)


@pytest.mark.parametrize("num_before", [0, 3])
def test_the_machine_would_notice_a_token_that_is_heard_twice(num_before: int) -> None:
    fleet = SimulatedFleet()
    fleet.join("a")
    fleet.port.submit(asked(0))
    fleet.run()
    told = fleet.gateway.told["r0"]
    twice = [event for event in told if isinstance(event, Token)][num_before]
    told.insert(told.index(twice), twice)
    with pytest.raises(AssertionError):
        check_heard(asked(0), told, is_cancelled=False)
