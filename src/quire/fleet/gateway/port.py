"""The third implementation of a client's port: many members, and a router that chooses among them.

    submit ─► a ledger of its own ─► router chooses ─► link ─► member
      ▲            │                                             │
      └─ events ◄──┴── what is new to the client ◄── events ◄────┘     member gone: the ledger moves the rest to another

A request's ledger keeps what was sent to its client. When its member is killed, hung or cut off, the request is routed
again as prompt and tokens, and the client sees the next token and nothing of this; late events of the old member have
an old epoch and are dropped. A request that was running on three members that died, with no token between, is ended.
A request that no member can take is held until one can.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from time import monotonic

from msgspec.structs import replace as struct_replace

from quire.core.digests import Namespace
from quire.core.events import Admitted, Finished, FirstToken, Refused, Replayed, RequestEvent, Token
from quire.core.request import Request
from quire.core.scheduling.shares import AdmissionHint
from quire.engine.calls import CallOp, CallReply, EngineCall, GetBlock, OnReply
from quire.engine.commands import Cancel, ClearCache, Restore, Submit
from quire.engine.engine import Clock, ModelInfo
from quire.engine.loop import ThreadWatch
from quire.engine.port import Listener
from quire.errors import DrainingError, EngineDeadError, QueueFullError, TenantShareError
from quire.fleet.gateway.members import FleetMembers, KnownMember
from quire.fleet.gateway.request import FleetRequest
from quire.fleet.protocol.link import LinkToMember
from quire.fleet.protocol.messages import (
    Assign,
    Goodbye,
    GoodbyeAck,
    MemberBeat,
    MemberStepped,
    TextAssets,
    ToGateway,
    Welcome,
)
from quire.fleet.routing.membership import SUSPECT_AFTER_S, MemberState, Transition

log = logging.getLogger("quire.fleet")

TICK_S = 0.25
MAX_OTHERS = 3
"""Members tried after the first has refused a request, before the client gets the refusal."""
FULL = (QueueFullError, TenantShareError)
LEAVING = (DrainingError, EngineDeadError)
"""Refusals that are about the member and not about the request."""


@dataclass(frozen=True, slots=True)
class FleetCounts:
    """Since the start."""

    num_moved: int
    """Requests that continued on another member."""
    num_moved_inexact: int
    """Of these, to a member whose results may differ in bits."""
    num_quarantined: int


class FleetPort:
    """Routes the requests of one model. Lives on one event loop."""

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
        self.text_assets: asyncio.Future[TextAssets] | None = None
        self.in_flight: dict[str, FleetRequest] = {}
        self.held: dict[str, FleetRequest] = {}
        """Requests that no member has, because none can take them now."""
        self.verdicts: Sequence[AdmissionHint] = ()
        self.watching = ThreadWatch(lambda _command: None)  # no pool to show: each member's own server shows one
        self._num_moved = self._num_moved_inexact = self._num_quarantined = 0
        self.is_draining = False
        self._is_closed = False
        self.on_change: Callable[[], None] = lambda: None
        """Called when a member may have become ready or have left."""

    @property
    def members(self) -> dict[str, KnownMember]:
        """Connected members, by their addresses. Read only."""
        return self._members.known

    @property
    def info(self) -> ModelInfo | None:
        """Of the first member: all others must run the same model."""
        return self._members.info

    @property
    def counts(self) -> FleetCounts:
        return FleetCounts(self._num_moved, self._num_moved_inexact, self._num_quarantined)

    @property
    def num_open(self) -> int:
        """Requests that have not had their last event."""
        return len(self.in_flight)

    @property
    def num_held(self) -> int:
        """Of these, those that no member has."""
        return len(self.held)

    @property
    def num_ready(self) -> int:
        return len(self.router.membership.ready_members)

    # -- a port --------------------------------------------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        refusal: DrainingError | QueueFullError | None = None
        if self.is_draining:
            refusal = DrainingError(
                "the gateway is shutting down and takes no new requests; use another one, or retry later"
            )
        elif len(self.held) >= self._max_held:
            refusal = QueueFullError(len(self.held), self._max_held)
        if refusal is not None:
            self._emit([Refused.of(request.request_id, refusal)])
            return
        flight = FleetRequest.of(request, 1 << 31 if self.info is None else self.info.vocabulary_size)
        self.in_flight[request.request_id] = flight
        self._place(flight)

    def cancel(self, request_id: str, index: int | None = None) -> None:
        flight = self.in_flight.get(request_id)
        if flight is None:
            return
        ledger = flight.ledger
        commands, events = ledger.cancel(request_id) if index is None else ledger.cancel_answer(request_id, index)
        for command in commands:
            self._send(flight.member, command)
        self._emit(self._forget_ended(flight, events))

    def clear_cache(self) -> None:
        """Drop every unused cached block, on all members."""
        for member in self.members:
            self._send(member, ClearCache())

    def call(self, op: CallOp, on_reply: OnReply) -> None:
        """Query the member that would get this prompt."""
        if isinstance(op, GetBlock):
            on_reply(EngineDeadError("a gateway has no KV blocks; query a member's own server"))
            return
        members = self._members
        best = self.router.best(members.routed("", op.namespace, op.prompt, {}), members.openai_members)
        if best is None:
            on_reply(EngineDeadError("no quire member is ready; retry when one is"))
            return
        own = struct_replace(op, namespace=self._as_named_by(best.member, op.namespace))
        self._send(best.member, self.members[best.member].calls.open(own, on_reply))

    # -- members -------------------------------------------------------------------------------------------------------

    def receive(self, link: LinkToMember, message: ToGateway) -> None:
        """Handle a message of a link. Raises MessageError for an invalid one: the link must be closed."""
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
            case CallReply():
                if link.address in self.members:
                    self.members[link.address].calls.resolve(message)
            case Goodbye():
                link.send(GoodbyeAck())
            case TextAssets():
                if self.text_assets is not None and not self.text_assets.done():
                    self.text_assets.set_result(message)

    def lost(self, link: LinkToMember, why: str) -> None:
        """The link is down."""
        known = self.members.get(link.address)
        if known is not None and known.link is link:
            log.log(logging.INFO if self._is_closed else logging.WARNING, "member %s is gone: %s", link.address, why)
            self._followed(self.router.leave(link.address))

    def tick(self, now_s: float) -> None:
        """Suspect silent members, and end requests that are held too long. To be called a few times a second."""
        self._followed(self._members.advance(now_s), "no heartbeat")
        for flight in list(self.held.values()):
            self._emit(self._forget_ended(flight, flight.ledger.expire(now_s)))
        if self.num_ready:
            self._place_held()  # those that were refused after output began

    def drain(self, member: str) -> None:
        """Give it no new requests."""
        self._followed(self._members.drain(member))

    def _followed(self, transitions: Iterable[Transition], why: str | None = None) -> None:
        """Move the requests of members that are gone; with a reason the link is closed as well."""
        for one in transitions:
            if one.after is MemberState.GONE:
                known = self.members.pop(one.member)
                if why is not None:
                    log.warning("dropping member %s: %s", one.member, why)
                    known.link.end(why)
                known.calls.fail_all(EngineDeadError(f"lost the member that had the request: {one.member}"))
                self._move_all(one.member)
            if one.after is MemberState.READY:
                self._place_held()
            self.on_change()

    def _move_all(self, member: str) -> None:
        for flight in [one for one in self.in_flight.values() if one.member == member]:
            self._emit(self._taken_back(flight, was_running=flight.is_running))
            if not flight.has_ended:
                flight.is_moving = True
                self._place(flight)

    # -- requests ------------------------------------------------------------------------------------------------------

    def _place(self, flight: FleetRequest) -> None:
        """Choose a member and send; hold the request if there is none."""
        request_id, now_s = flight.request.request_id, self._clock()
        choice = self._members.choose(flight, now_s)
        if choice is None:
            self.held[request_id] = flight
            return
        self.held.pop(request_id, None)
        self._count_move(flight, choice.member)
        flight.member, flight.is_running, flight.is_moving = choice.member, False, False
        num_uncached = len(flight.tokens) - choice.num_cached_tokens
        for command in flight.ledger.due(now_s):
            if isinstance(command, Submit | Restore):
                self._members.note_assignment(choice.member, now_s)
                own = struct_replace(command, namespace=self._as_named_by(choice.member, command.namespace))
                self._send(choice.member, Assign(own, num_uncached))

    def _as_named_by(self, member: str, namespace: Namespace) -> Namespace:
        """A gateway that began with OpenAI members has its own name for the model; a member needs the fingerprint."""
        return replace(namespace, model=self.members[member].card.info.identity.fingerprint)

    def _count_move(self, flight: FleetRequest, member: str) -> None:
        self._num_moved += flight.is_moving
        if flight.exactness not in (None, self.members[member].exactness):
            self._num_moved_inexact += 1
            log.warning("request %s moved to a member with different numerics", flight.request.request_id)
            self._emit([Replayed(flight.request.request_id, is_exact=False)])

    def _place_held(self) -> None:
        """Members that refused them before may take them now."""
        for flight in list(self.held.values()):
            flight.refusals.clear()
            self._place(flight)

    def _stepped(self, link: LinkToMember, events: Sequence[RequestEvent]) -> None:
        output: list[RequestEvent] = []
        try:
            for event in events:
                self._take(link, event, output)
        finally:
            self._emit(output)

    def _take(self, link: LinkToMember, event: RequestEvent, output: list[RequestEvent]) -> None:
        flight = self.in_flight.get(event.request_id)
        if flight is None or flight.member != link.address:
            return  # of an assignment that is over
        is_current = event.epoch == flight.entry.epoch
        if is_current and isinstance(event, Replayed):
            flight.is_running = False  # its worker was replaced, and starts it again
            output.append(event)
            return
        if is_current and isinstance(event, Refused):
            self._take_refusal(flight, event, output)
            return
        new: list[RequestEvent] = []
        flight.ledger.take([event], new)
        if is_current and isinstance(event, Admitted):
            flight.is_running = True
        elif is_current and isinstance(event, FirstToken):
            self.router.computed(event.request_id)
        elif is_current and isinstance(event, Token) and flight.exactness is None:
            flight.exactness = self.members[link.address].exactness
        output += self._forget_ended(flight, new)

    def _take_refusal(self, flight: FleetRequest, event: Refused, output: list[RequestEvent]) -> None:
        """The member is full or leaving: try a few others. A request with output is never refused."""
        member, error = flight.member, event.error
        if flight.entry.is_cancelled or member is None or not isinstance(error, FULL + LEAVING):
            self._end_refused(flight, event, output)
            return
        flight.refusals[member] = event
        num_left = len(self.router.membership.ready_members.keys() - flight.refusals.keys())
        has_tried = len(flight.refusals) > MAX_OTHERS or (num_left == 0 and isinstance(error, FULL))
        if has_tried and not flight.has_begun:
            self._end_refused(flight, flight.best_refusal(), output)
            return
        output += self._taken_back(flight, was_running=False)
        if flight.has_ended:
            return  # its client needs no more of it
        if has_tried:
            self.held[event.request_id] = flight
        else:
            self._place(flight)

    def _end_refused(self, flight: FleetRequest, event: Refused, output: list[RequestEvent]) -> None:
        new: list[RequestEvent] = []
        flight.ledger.take([event], new)
        output += self._forget_ended(flight, new)

    def _taken_back(self, flight: FleetRequest, *, was_running: bool) -> list[RequestEvent]:
        output = flight.taken_back(was_running=was_running)
        self._num_quarantined += flight.ledger.num_quarantined
        self._followed(self.router.moved(flight.request.request_id))
        return self._forget_ended(flight, output)

    def _forget_ended(self, flight: FleetRequest, events: list[RequestEvent]) -> list[RequestEvent]:
        if any(isinstance(event, Finished | Refused) for event in events):
            request_id = flight.request.request_id
            self.in_flight.pop(request_id, None)
            self.held.pop(request_id, None)
            self._followed(self.router.ended(request_id))
        return events

    # -- output --------------------------------------------------------------------------------------------------------

    def _send(self, member: str | None, command: Assign | Cancel | ClearCache | EngineCall) -> None:
        known = None if member is None else self.members.get(member)
        if known is not None:
            known.link.send(command)

    def _emit(self, events: list[RequestEvent]) -> None:
        if events:
            self._listener(events)

    def abandon(self, why: str) -> None:
        """Refuse the requests that are not admitted: there will be no member any more."""
        self._is_closed = True
        error = EngineDeadError(why)
        for known in self.members.values():
            known.calls.fail_all(error)
        for request_id, flight in list(self.in_flight.items()):
            del self.in_flight[request_id]
            self.held.pop(request_id, None)
            self._followed(self.router.ended(request_id))
            self._emit(flight.ledger.abandon(error))
