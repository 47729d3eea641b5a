"""Fleets in one thread: real ports, desks and engines, links that are two queues of bytes, and a clock that is set.

No sockets, no processes and no sleep, so that hundreds of fleets go by in a second. What is on its way is lost when a
link breaks; what was said before may be said again.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from quire.backends.oracle import OracleRunner
from quire.backends.protocol import Capacity
from quire.core.events import Refused, RequestEvent, SequenceFinished, Token
from quire.core.request import Continuation, Request, ResolvedSampling
from quire.core.scheduling.shares import AdmissionHint
from quire.engine.calls import CallOp, Explain, Explained, OnReply
from quire.engine.engine import Engine, ModelIdentity
from quire.engine.port import CommandWatch
from quire.errors import MessageError, QuireError
from quire.fleet.gateway.port import FleetPort
from quire.fleet.member.service import MemberService
from quire.fleet.protocol.messages import (
    PROTOCOL,
    GatewayBeat,
    Hello,
    MemberCard,
    MemberStepped,
    TextAssets,
    ToGateway,
    ToMember,
    decode_to_gateway,
    decode_to_member,
    encode_fleet_message,
)
from quire.worker.messages import WorkerLoad
from quire.worker.parent.supervisor import State
from tests.support.workers.lives import CONFIG, IDENTITY, VOCABULARY

SPACE = IDENTITY.namespace(4, "group")
WORDS = TextAssets(b"{}", None, (), (), {}, {})


def asked(number: int, *, n: int = 1, max_tokens: int = 8, deadline_s: float | None = None) -> Request:
    """A request whose prompt is like no other's."""
    return Request(
        f"r{number}",
        (1, 2, 3, 4, number % VOCABULARY, number // VOCABULARY % VOCABULARY),
        SPACE,
        0.0,
        ResolvedSampling(max_tokens=max_tokens),
        seed=number,
        continuations=tuple(Continuation(index) for index in range(n)),
        deadline_s=deadline_s,
    )


class EngineSeat:
    """What a desk takes for a supervisor: an engine that steps when it is told to."""

    def __init__(self, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        runner = OracleRunner(Capacity(64, 4, 64, CONFIG.max_step_tokens, VOCABULARY, 32))
        self.engine = Engine(runner, CONFIG, IDENTITY, bytes(32))
        self.state = State.READY
        self.load = WorkerLoad()
        self.admission_hints: Sequence[AdmissionHint] = ()
        self.watching = CommandWatch(lambda _command: None)
        self.tell: Callable[[Sequence[RequestEvent]], None] = lambda _events: None
        self.refusal: QuireError | None = None
        """What whoever asks is told."""
        self.num_clears = 0
        self.holds_replies = False
        self.held: list[Callable[[], None]] = []

    def submit(self, request: Request) -> None:
        if self.refusal is not None:
            self.tell([Refused.of(request.request_id, self.refusal)])
            return
        enter = self.engine.restore if request.has_begun else self.engine.submit
        self.tell([enter(request)])

    def cancel(self, request_id: str, index: int | None = None) -> None:
        self.engine.cancel(request_id, index)

    def call(self, op: CallOp, on_reply: OnReply) -> None:
        assert isinstance(op, Explain)
        explained = Explained(self.engine.explain(op.namespace, op.prompt, self._now_s()))
        self.held.append(lambda: on_reply(explained))
        if not self.holds_replies:
            self.release_replies()

    def release_replies(self) -> None:
        held, self.held = self.held, []
        for reply in held:
            reply()

    def clear_cache(self) -> None:
        self.num_clears += 1

    def step(self) -> None:
        if self.engine.has_work:
            self.tell(self.engine.step(self._now_s))


class QueueLink:
    """One meeting of a gateway and a member."""

    is_openai = False

    def __init__(self, address: str, identity: bytes) -> None:
        self.address = address
        self.identity = identity
        self.to_member: deque[bytes] = deque()
        self.to_gateway: deque[bytes] = deque()
        self.is_over = False
        self.why = ""

    def send(self, message: ToMember) -> None:
        if not self.is_over:
            self.to_member.append(encode_fleet_message(message))

    def end(self, why: str) -> None:
        self.is_over, self.why = True, why


@dataclass
class SimulatedMember:
    """One life of a member."""

    seat: EngineSeat
    desk: MemberService
    links: dict[bytes, QueueLink] = field(default_factory=dict)
    is_hung: bool = False


class SimulatedGateway:
    """A port, and what each of its clients was told."""

    def __init__(self, fleet: "SimulatedFleet", max_held: int = 100) -> None:
        self.told: dict[str, list[RequestEvent]] = {}
        self.port = FleetPort(self._listen, max_held, clock=lambda: fleet.now_s)
        self.links: dict[str, QueueLink] = {}

    def _listen(self, events: Sequence[RequestEvent]) -> None:
        for event in events:
            self.told.setdefault(event.request_id, []).append(event)

    def tokens(self, request_id: str, index: int = 0) -> list[int]:
        told = self.told.get(request_id, [])
        return [event.token_id for event in told if isinstance(event, Token) and event.sequence_index == index]

    def ends(self, request_id: str) -> list[SequenceFinished]:
        return [event for event in self.told.get(request_id, []) if isinstance(event, SequenceFinished)]

    def kinds(self, request_id: str) -> list[type]:
        return [type(event) for event in self.told.get(request_id, [])]

    def of(self, request_id: str) -> str | None:
        """Who has a request."""
        routed = self.port.router.routed.get(request_id)
        return None if routed is None else routed.assignment.member


class SimulatedFleet:
    """Members by their addresses, and the gateways before them."""

    def __init__(self, num_gateways: int = 1, max_held: int = 100) -> None:
        self.now_s = 0.0
        self.members: dict[str, SimulatedMember] = {}
        self.gateways = [SimulatedGateway(self, max_held) for _ in range(num_gateways)]
        self.said: list[tuple[str, ToGateway]] = []
        """Every message of a member's, with its address, whether or not it arrived."""
        self._num_meetings = 0
        self._num_lives = 0

    @property
    def gateway(self) -> SimulatedGateway:
        return self.gateways[0]

    @property
    def port(self) -> FleetPort:
        return self.gateway.port

    # -- members -------------------------------------------------------------------------------------------------------

    def start(
        self, address: str, *, exactness: str = "same", model: str = "oracle", max_sequence_tokens: int = 64
    ) -> SimulatedMember:
        """A member that nobody has met."""
        seat = EngineSeat(lambda: self.now_s)
        self._num_lives += 1
        info = replace(
            seat.engine.info,
            exactness=exactness,
            identity=ModelIdentity(model, "slots"),
            max_sequence_tokens=max_sequence_tokens,
        )
        card = MemberCard("oracle", info, f"life {self._num_lives}")
        member = SimulatedMember(seat, MemberService(seat, card, WORDS, self._sender(address), lambda: self.now_s))
        seat.tell = member.desk.on_events
        self.members[address] = member
        return member

    def _sender(self, address: str) -> Callable[[bytes, ToGateway], bool]:
        def send(identity: bytes, message: ToGateway) -> bool:
            member = self.members.get(address)
            link = None if member is None else member.links.get(identity)
            if link is None or link.is_over:
                return False
            link.to_gateway.append(encode_fleet_message(message))
            self.said.append((address, message))
            return True

        return send

    def meet(self, address: str, gateway: SimulatedGateway | None = None) -> QueueLink:
        """A gateway connects; the old connection, if there is one, is over."""
        gateway = gateway or self.gateway
        self.cut(address, gateway)
        self._num_meetings += 1
        link = QueueLink(address, self._num_meetings.to_bytes(4, "big"))
        gateway.links[address] = self.members[address].links[link.identity] = link
        link.send(Hello(PROTOCOL, "gateway"))
        return link

    def cut(self, address: str, gateway: SimulatedGateway | None = None, why: str = "cut") -> None:
        """The connection breaks: whatever was on its way is lost, and the member goes on."""
        gateway = gateway or self.gateway
        link = gateway.links.pop(address, None)
        if link is not None:
            link.end(why)
            gateway.port.handle_loss(link, why)

    def kill(self, address: str) -> None:
        """The member's machine is gone."""
        del self.members[address]
        for gateway in self.gateways:
            self.cut(address, gateway, "killed")

    def join(self, *addresses: str, **told: str) -> None:
        """Members that all gateways have met, and that are ready."""
        for address in addresses:
            self.start(address, **told)  # type: ignore[arg-type]
            for gateway in self.gateways:
                self.meet(address, gateway)
        self.talk()

    # -- time ----------------------------------------------------------------------------------------------------------

    def deliver(self, link: QueueLink, gateway: SimulatedGateway, num_most: int = 1 << 30) -> None:
        """What is on its way arrives, in its order, both ways."""
        member = self.members.get(link.address)
        if member is None or member.is_hung:
            return
        for _ in range(min(num_most, len(link.to_member))):
            try:
                member.desk.receive(link.identity, decode_to_member(link.to_member.popleft()))
            except MessageError:
                continue
        for _ in range(min(num_most, len(link.to_gateway))):
            if link.is_over:
                break
            self.hear(gateway, link, decode_to_gateway(link.to_gateway.popleft()))
        if link.is_over and gateway.links.get(link.address) is link:
            self.cut(link.address, gateway, link.why)

    def hear(self, gateway: SimulatedGateway, link: QueueLink, message: ToGateway) -> None:
        """One message arrives; a lie ends the link."""
        try:
            gateway.port.receive(link, message)
        except MessageError as error:
            self.cut(link.address, gateway, str(error))

    def talk(self) -> None:
        """Until nobody has anything to say; nobody steps."""
        while any(
            link.to_member or link.to_gateway
            for gateway in self.gateways
            for link in gateway.links.values()
            if not link.is_over and not self.members[link.address].is_hung
        ):
            for gateway in self.gateways:
                for link in list(gateway.links.values()):
                    self.deliver(link, gateway)

    def step(self, *addresses: str) -> None:
        """Everybody, or these, make one step and all is told."""
        self.talk()
        for address in addresses or list(self.members):
            member = self.members[address]
            if not member.is_hung:
                member.seat.step()
        self.talk()

    def run(self, max_steps: int = 500) -> None:
        """Until no request is open."""
        while any(gateway.port.num_open for gateway in self.gateways):
            self.step()
            max_steps -= 1
            assert max_steps, "some requests come to no end"

    def let_pass(self, seconds: float) -> None:
        """Time passes in quarters of a second, with all its beats and ticks."""
        for quarter in range(1, round(seconds * 4) + 1):
            self.now_s += 0.25
            if quarter % 4 == 0:
                for link in [link for gateway in self.gateways for link in gateway.links.values()]:
                    link.send(GatewayBeat())
                self.talk()
            for member in self.members.values():
                if quarter % 4 == 0 and not member.is_hung:
                    member.desk.forget_silent()
                    member.desk.send_heartbeats()
            self.talk()
            for gateway in self.gateways:
                gateway.port.tick(self.now_s)
                for link in [one for one in gateway.links.values() if one.is_over]:
                    self.cut(link.address, gateway, link.why)

    def stepped(self, address: str) -> list[MemberStepped]:
        """What this member's lives said of requests."""
        return [message for said, message in self.said if said == address and isinstance(message, MemberStepped)]

    def check_empty(self) -> None:
        """Nothing is left behind anywhere."""
        for gateway in self.gateways:
            port = gateway.port
            assert (port.in_flight, port.held, port.router.routed) == ({}, {}, {})
            assert not any(len(known.calls) for known in port.members.values())
            assert not port.router.loads.member_of
            assert all(port.router.membership.num_open(one) == 0 for one in port.members)
        for member in self.members.values():
            assert (member.desk.assignments, member.desk.num_uncomputed_tokens) == ({}, 0)
            assert all(not one.local_ids for one in member.desk._gateways.values())
