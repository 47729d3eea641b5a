"""The third way behind a client's port: many members, and a router that chooses among them.

    submit ─► a ledger of its own ─► router chooses ─► link ─► member
      ▲            │                                             │
      └─ events ◄──┴── what is new to the client ◄── events ◄────┘     member gone: the ledger asks another for the rest

A request's ledger keeps what its client was told. When its member is killed, hung or cut off, the request is chosen for
again as prompt and tokens, and the client sees the next token and nothing of this; what the old member still says is
of an old epoch and is dropped. A request that was running on three members that died, with no token between, is ended.
A request that nobody can take, because nobody is there, is held until somebody is.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from time import monotonic

from msgspec.structs import replace as struct_replace

from quire.core.digests import Namespace
from quire.core.events import Admitted, Explained, Finished, FirstToken, Refused, Replayed, RequestEvent, Token
from quire.core.request import Request
from quire.core.scheduling.shares import Verdict
from quire.engine.commands import Cancel, ClearCache, Explain, Restore, Submit
from quire.engine.engine import Clock, ModelInfo
from quire.engine.port import Listener
from quire.errors import DrainingError, EngineDeadError, QueueFullError, TenantShareError
from quire.fleet.gateway.members import FleetMembers, KnownMember
from quire.fleet.gateway.request import FleetRequest
from quire.fleet.gateway.watch import FleetWatch
from quire.fleet.protocol.link import LinkToMember
from quire.fleet.protocol.messages import (
    Assign,
    Farewell,
    FarewellHeard,
    MemberBeat,
    MemberStepped,
    ModelWords,
    ToGateway,
    Welcome,
)
from quire.fleet.routing.membership import SUSPECT_AFTER_S, MemberState, Transition

log = logging.getLogger("quire.fleet")

TICK_S = 0.25
MAX_OTHERS = 3
"""Members that are asked after the first has turned a request away, before the client is told."""
FULL = (QueueFullError, TenantShareError)
LEAVING = (DrainingError, EngineDeadError)
"""Refusals that are about the member and not about the request."""


@dataclass(frozen=True, slots=True)
class FleetCounts:
    """What has happened since the start."""

    num_moved: int
    """Requests that went on with another member."""
    num_moved_inexact: int
    """Of these, to one that may compute other bits."""
    num_quarantined: int


class FleetPort:
    """Where requests of one model go. Lives on one event loop."""

    def __init__(
        self,
        listener: Listener,
        max_held: int,
        *,
        salt: str = "",
        suspect_after_s: float = SUSPECT_AFTER_S,
        clock: Clock = monotonic,
    ) -> None:
        self._listener = listener
        self._max_held = max_held
        self._clock = clock
        self._members = FleetMembers(salt, suspect_after_s, clock)
        self.router = self._members.router
        self.words: asyncio.Future[ModelWords] | None = None
        self._flights: dict[str, FleetRequest] = {}
        self._held: dict[str, FleetRequest] = {}
        """Those that no member has, because nobody can take them now."""
        self._questions: dict[str, str] = {}
        """Question -> the member that was asked."""
        self.verdicts: Sequence[Verdict] = ()
        self.watching = FleetWatch()
        self._num_moved = self._num_moved_inexact = self._num_quarantined = 0
        self.is_draining = False
        self._is_closed = False
        self.on_change: Callable[[], None] = lambda: None
        """Told when somebody may have become ready or have left."""

    @property
    def members(self) -> dict[str, KnownMember]:
        """Those that are there, by their addresses. Read only."""
        return self._members.known

    @property
    def info(self) -> ModelInfo | None:
        """Of the first member: all others must compute the same model."""
        return self._members.info

    @property
    def counts(self) -> FleetCounts:
        """For metrics."""
        return FleetCounts(self._num_moved, self._num_moved_inexact, self._num_quarantined)

    @property
    def num_open(self) -> int:
        """Requests that have not had their last event."""
        return len(self._flights)

    @property
    def num_held(self) -> int:
        """Of these, those that nobody has."""
        return len(self._held)

    @property
    def num_ready(self) -> int:
        """Members that get work."""
        return len(self.router.membership.ready_members)

    # -- a port --------------------------------------------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        """Queue a request: `Queued` or `Refused` is its first event."""
        refusal: DrainingError | QueueFullError | None = None
        if self.is_draining:
            refusal = DrainingError("the gateway is going down and takes no new requests; ask another one, or later")
        elif len(self._held) >= self._max_held:
            refusal = QueueFullError(len(self._held), self._max_held)
        if refusal is not None:
            self._tell([Refused.of(request.request_id, refusal)])
            return
        flight = FleetRequest.of(request, 1 << 31 if self.info is None else self.info.vocabulary_size)
        self._flights[request.request_id] = flight
        self._place(flight)

    def cancel(self, request_id: str, index: int | None = None) -> None:
        """End a request, or one of its answers alone, if it lives."""
        flight = self._flights.get(request_id)
        if flight is None:
            return
        ledger = flight.ledger
        commands, events = ledger.cancel(request_id) if index is None else ledger.cancel_answer(request_id, index)
        for command in commands:
            self._say(flight.member, command)
        self._tell(self._forget_ended(flight, events))

    def clear_cache(self) -> None:
        """Forget every cached block that nobody uses, on all members."""
        for member in self.members:
            self._say(member, ClearCache())

    def explain(self, question_id: str, namespace: Namespace, prompt: tuple[int, ...]) -> None:
        """Ask the member that would get this prompt why it is not in its cache."""
        members = self._members
        best = self.router.best(members.routed(question_id, namespace, prompt, {}), members.strangers)
        if best is None:
            error = EngineDeadError("there is no member of quire's own at this moment; ask again when one is ready")
            self._tell([Refused.of(question_id, error)])
            return
        self._questions[question_id] = best.member
        self._say(best.member, Explain(question_id, self._as_named_by(best.member, namespace), prompt))

    # -- members -------------------------------------------------------------------------------------------------------

    def hear(self, link: LinkToMember, message: ToGateway) -> None:
        """What a link brings. Raises MessageError for what cannot be: the link must be broken off."""
        match message:
            case Welcome(_, card):
                self._members.welcome(link, card)
            case MemberStepped(events, report):
                self._stepped(link, events)
                if report is not None:
                    self._members.report(link.address, report)
            case MemberBeat(state, report):
                self._members.report(link.address, report)
                self._followed(self._members.beat(link.address, state))
            case Farewell():
                link.send(FarewellHeard())
            case ModelWords():
                if self.words is not None and not self.words.done():
                    self.words.set_result(message)

    def lost(self, link: LinkToMember, why: str) -> None:
        """Nothing more comes over this link."""
        known = self.members.get(link.address)
        if known is not None and known.link is link:
            log.log(logging.INFO if self._is_closed else logging.WARNING, "member %s is gone: %s", link.address, why)
            self._followed(self.router.leave(link.address))

    def tick(self, now_s: float) -> None:
        """Judge who is silent, and end who is held too long. To be called a few times a second."""
        self._followed(self._members.advance(now_s), "it was not heard of any more")
        for flight in list(self._held.values()):
            self._tell(self._forget_ended(flight, flight.ledger.expire(now_s)))
        if self.num_ready:
            self._place_held()  # those who were turned away in the middle of their answers

    def drain(self, member: str) -> None:
        """It gets nothing new."""
        self._followed(self._members.drain(member))

    def _followed(self, transitions: Iterable[Transition], why: str | None = None) -> None:
        """Whoever is gone has its requests taken from it; with a reason its link is broken off as well."""
        for one in transitions:
            if one.after is MemberState.GONE:
                known = self.members.pop(one.member)
                if why is not None:
                    log.warning("member %s is given up: %s", one.member, why)
                    known.link.end(why)
                self._move_all(one.member)
            if one.after is MemberState.READY:
                self._place_held()
            self.on_change()

    def _move_all(self, member: str) -> None:
        dead = EngineDeadError(f"the member that was asked is gone: {member}")
        gone = [question for question, asked in self._questions.items() if asked == member]
        for question in gone:
            del self._questions[question]
        self._tell([Refused.of(question, dead) for question in gone])
        for flight in [one for one in self._flights.values() if one.member == member]:
            self._tell(self._taken_back(flight, was_running=flight.is_running))
            if not flight.has_ended:
                flight.is_moving = True
                self._place(flight)

    # -- requests ------------------------------------------------------------------------------------------------------

    def _place(self, flight: FleetRequest) -> None:
        """Choose and send; hold it if that cannot be."""
        request_id, now_s = flight.request.request_id, self._clock()
        choice = self._members.choose(flight, now_s)
        if choice is None:
            self._held[request_id] = flight
            return
        self._held.pop(request_id, None)
        self._count_move(flight, choice.member)
        flight.member, flight.is_running, flight.is_moving = choice.member, False, False
        num_uncached = len(flight.tokens) - choice.num_cached_tokens
        for command in flight.ledger.due(now_s):
            if isinstance(command, Submit | Restore):
                self._members.given(choice.member, now_s)
                own = struct_replace(command, namespace=self._as_named_by(choice.member, command.namespace))
                self._say(choice.member, Assign(own, num_uncached))

    def _as_named_by(self, member: str, namespace: Namespace) -> Namespace:
        """A gateway that began with strangers alone had to call the model something; its members know what it is."""
        return replace(namespace, model=self.members[member].card.info.identity.fingerprint)

    def _count_move(self, flight: FleetRequest, member: str) -> None:
        self._num_moved += flight.is_moving
        if flight.exactness not in (None, self.members[member].exactness):
            self._num_moved_inexact += 1
            log.warning("request %s goes on with a member of other bits", flight.request.request_id)
            self._tell([Replayed(flight.request.request_id, is_exact=False)])

    def _place_held(self) -> None:
        """Whoever turned them away before may take them now."""
        for flight in list(self._held.values()):
            flight.refusals.clear()
            self._place(flight)

    def _stepped(self, link: LinkToMember, events: Sequence[RequestEvent]) -> None:
        told: list[RequestEvent] = []
        try:
            for event in events:
                self._take(link, event, told)
        finally:
            self._tell(told)

    def _take(self, link: LinkToMember, event: RequestEvent, told: list[RequestEvent]) -> None:
        if isinstance(event, Explained | Refused) and self._questions.get(event.request_id) == link.address:
            del self._questions[event.request_id]
            told.append(event)
            return
        flight = self._flights.get(event.request_id)
        if flight is None or flight.member != link.address:
            return  # of an assignment that is over
        is_current = event.epoch == flight.entry.epoch
        if is_current and isinstance(event, Replayed):
            flight.is_running = False  # its worker was replaced, and begins with it anew
            told.append(event)
            return
        if is_current and isinstance(event, Refused):
            self._take_refusal(flight, event, told)
            return
        new: list[RequestEvent] = []
        flight.ledger.take([event], new)
        if is_current and isinstance(event, Admitted):
            flight.is_running = True
        elif is_current and isinstance(event, FirstToken):
            self.router.computed(event.request_id)
        elif is_current and isinstance(event, Token) and flight.exactness is None:
            flight.exactness = self.members[link.address].exactness
        told += self._forget_ended(flight, new)

    def _take_refusal(self, flight: FleetRequest, event: Refused, told: list[RequestEvent]) -> None:
        """A member without room, or one that is leaving: others are asked, a few. Who has begun is never sent away."""
        member, error = flight.member, event.error
        if flight.entry.is_cancelled or member is None or not isinstance(error, FULL + LEAVING):
            self._end_refused(flight, event, told)
            return
        flight.refusals[member] = event
        num_left = len(self.router.membership.ready_members.keys() - flight.refusals.keys())
        has_tried = len(flight.refusals) > MAX_OTHERS or (num_left == 0 and isinstance(error, FULL))
        if has_tried and not flight.has_begun:
            self._end_refused(flight, flight.best_refusal(), told)
            return
        told += self._taken_back(flight, was_running=False)
        if flight.has_ended:
            return  # its client had all it wanted
        if has_tried:
            self._held[event.request_id] = flight
        else:
            self._place(flight)

    def _end_refused(self, flight: FleetRequest, event: Refused, told: list[RequestEvent]) -> None:
        new: list[RequestEvent] = []
        flight.ledger.take([event], new)
        told += self._forget_ended(flight, new)

    def _taken_back(self, flight: FleetRequest, *, was_running: bool) -> list[RequestEvent]:
        told = flight.taken_back(was_running=was_running)
        self._num_quarantined += flight.ledger.num_quarantined
        self._followed(self.router.moved(flight.request.request_id))
        return self._forget_ended(flight, told)

    def _forget_ended(self, flight: FleetRequest, events: list[RequestEvent]) -> list[RequestEvent]:
        """A request that has had its last event is nobody's any more."""
        if any(isinstance(event, Finished | Refused) for event in events):
            request_id = flight.request.request_id
            self._flights.pop(request_id, None)
            self._held.pop(request_id, None)
            self._followed(self.router.ended(request_id))
        return events

    # -- what is said to whom ------------------------------------------------------------------------------------------

    def _say(self, member: str | None, command: Assign | Cancel | ClearCache | Explain) -> None:
        known = None if member is None else self.members.get(member)
        if known is not None:
            known.link.send(command)

    def _tell(self, events: list[RequestEvent]) -> None:
        if events:
            self._listener(events)

    def abandon(self, why: str) -> None:
        """There will be no member any more: who waits to be let in is told."""
        self._is_closed = True
        error = EngineDeadError(why)
        for request_id, flight in list(self._flights.items()):
            del self._flights[request_id]
            self._held.pop(request_id, None)
            self._followed(self.router.ended(request_id))
            self._tell(flight.ledger.abandon(error))
