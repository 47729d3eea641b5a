"""The engine port of a fleet: a router chooses one of many members for each request.

    submit ─► ledger per request ─► router ─► link ─► member
      ▲            │                                    │
      └─ events ◄──┴── new events only ◄──── events ◄───┘     member lost: the request is routed again

A request's ledger records what was sent to its client. If a member dies, hangs or is disconnected, its requests are
routed again with prompt and output tokens, and the client only sees the next token. Late events of the lost member
carry an old epoch (assignment number) and are dropped. A request is ended if three members in a row were lost while it
ran on them and it produced no token. A request that no member can serve now is held until a member can.
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
from quire.engine.port import CommandWatch, Listener
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
MAX_NEXT_MEMBERS = 3
"""Number of further members that are tried after a refusal, before the client gets the refusal."""
FULL_ERRORS = (QueueFullError, TenantShareError)
LEAVING_ERRORS = (DrainingError, EngineDeadError)
"""`FULL_ERRORS` and `LEAVING_ERRORS`: the state of the member causes these refusals, not the request."""


@dataclass(slots=True)
class FleetCounts:
    """Counters since the gateway started."""

    num_moved: int = 0
    """Requests that continued on another member."""
    num_moved_inexact: int = 0
    """Requests in `num_moved` that continued on a member with different numerics."""
    num_quarantined: int = 0


class FleetPort:
    """Routes the requests of one model. All methods run on one event loop."""

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
        """Requests without a member, because no member can serve them now."""
        self.admission_hints: Sequence[AdmissionHint] = ()
        self.watching = CommandWatch(lambda _command: None)  # the gateway has no KV cache to show
        self.counts = FleetCounts()
        self.is_draining = False
        self._is_closed = False
        self.on_change: Callable[[], None] = lambda: None
        """Called when a member may have become ready or left."""

    @property
    def members(self) -> dict[str, KnownMember]:
        """Connected members by address. Read only."""
        return self._members.by_address

    @property
    def info(self) -> ModelInfo | None:
        """Model info of the first member: all others must run the same model."""
        return self._members.info

    @property
    def num_open(self) -> int:
        return len(self.in_flight)

    @property
    def num_held(self) -> int:
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
        for member in self.members:
            self._send(member, ClearCache())

    def call(self, op: CallOp, on_reply: OnReply) -> None:
        """Send the query to the quire member that would get a request with this prompt."""
        if isinstance(op, GetBlock):
            on_reply(EngineDeadError("a gateway has no KV blocks; query a member's own server"))
            return
        members = self._members
        best = self.router.best(members.routed_prompt("", op.namespace, op.prompt, {}), members.openai_members)
        if best is None:
            on_reply(EngineDeadError("no quire member is ready; retry when one is"))
            return
        member_op = struct_replace(op, namespace=self._namespace_of(best.member, op.namespace))
        self._send(best.member, self.members[best.member].calls.open(member_op, on_reply))

    # -- members -------------------------------------------------------------------------------------------------------

    def receive(self, link: LinkToMember, message: ToGateway) -> None:
        """Handle a message from a link. Raises MessageError if it is invalid; the caller then closes the link."""
        match message:
            case Welcome(_, card):
                self._members.welcome(link, card)
            case MemberStepped(events, report):
                self._handle_events(link, events)
                if report is not None:
                    self._members.report(link.address, report)
            case MemberBeat(state, report):
                self._members.report(link.address, report)
                self._apply_transitions(self._members.handle_heartbeat(link.address, state))
            case CallReply():
                if link.address in self.members:
                    self.members[link.address].calls.resolve(message)
            case Goodbye():
                link.send(GoodbyeAck())
            case TextAssets():
                if self.text_assets is not None and not self.text_assets.done():
                    self.text_assets.set_result(message)

    def handle_loss(self, link: LinkToMember, reason: str) -> None:
        """Remove the member of a link whose session has ended, and move its requests."""
        record = self.members.get(link.address)
        if record is not None and record.link is link:
            log.log(logging.INFO if self._is_closed else logging.WARNING, "member %s is gone: %s", link.address, reason)
            self._apply_transitions(self.router.leave(link.address))

    def tick(self, now_s: float) -> None:
        """Suspect silent members, and end held requests that are past their deadline. Call a few times per second."""
        self._apply_transitions(self._members.advance(now_s), "no heartbeat")
        for flight in list(self.held.values()):
            self._emit(self._forget_ended(flight, flight.ledger.expire(now_s)))
        if self.num_ready:
            self._place_held()  # requests that every member refused after output had begun

    def drain(self, member: str) -> None:
        """Send this member no new requests."""
        self._apply_transitions(self._members.drain(member))

    def _apply_transitions(self, transitions: Iterable[Transition], reason: str | None = None) -> None:
        """Move the requests of lost members, and place held requests if one is ready. With `reason`, also end links."""
        for transition in transitions:
            if transition.new_state is MemberState.GONE:
                record = self.members.pop(transition.member)
                if reason is not None:
                    log.warning("dropping member %s: %s", transition.member, reason)
                    record.link.end(reason)
                record.calls.fail_all(EngineDeadError(f"lost the member of this query: {transition.member}"))
                self._move_all(transition.member)
            if transition.new_state is MemberState.READY:
                self._place_held()
            self.on_change()

    def _move_all(self, member: str) -> None:
        for flight in [request for request in self.in_flight.values() if request.member == member]:
            self._emit(self._take_back(flight, was_running=flight.is_running))
            if not flight.has_ended:
                flight.is_moving = True
                self._place(flight)

    # -- requests ------------------------------------------------------------------------------------------------------

    def _place(self, flight: FleetRequest) -> None:
        """Choose a member and send the request to it; hold the request if there is no suitable member."""
        request_id, now_s = flight.request.request_id, self._clock()
        choice = self._members.choose(flight, now_s)
        if choice is None:
            self.held[request_id] = flight
            return
        self.held.pop(request_id, None)
        self._count_move(flight, choice.member)
        flight.member, flight.is_running, flight.is_moving = choice.member, False, False
        num_uncached = len(flight.tokens) - choice.num_cached_tokens
        for command in flight.ledger.due_commands(now_s):
            if isinstance(command, Submit | Restore):
                self._members.note_assignment(choice.member, now_s)
                outgoing = struct_replace(command, namespace=self._namespace_of(choice.member, command.namespace))
                self._send(choice.member, Assign(outgoing, num_uncached))

    def _namespace_of(self, member: str, namespace: Namespace) -> Namespace:
        """Use the member's model fingerprint: the gateway's own is different if an OpenAI member was the first."""
        return replace(namespace, model=self.members[member].card.info.identity.fingerprint)

    def _count_move(self, flight: FleetRequest, member: str) -> None:
        self.counts.num_moved += flight.is_moving
        if flight.exactness not in (None, self.members[member].exactness):
            self.counts.num_moved_inexact += 1
            log.warning("request %s moved to a member with different numerics", flight.request.request_id)
            self._emit([Replayed(flight.request.request_id, is_exact=False)])

    def _place_held(self) -> None:
        """Try all held requests again, also on members that refused them before."""
        for flight in list(self.held.values()):
            flight.refusals.clear()
            self._place(flight)

    def _handle_events(self, link: LinkToMember, events: Sequence[RequestEvent]) -> None:
        output: list[RequestEvent] = []
        try:
            for event in events:
                self._take(link, event, output)
        finally:
            self._emit(output)

    def _take(self, link: LinkToMember, event: RequestEvent, output: list[RequestEvent]) -> None:
        flight = self.in_flight.get(event.request_id)
        if flight is None or flight.member != link.address:
            return  # the request has ended or moved to another member
        is_current = event.epoch == flight.entry.epoch
        if is_current and isinstance(event, Replayed):
            flight.is_running = False  # the member replaced its worker, which restarts the request
            output.append(event)
            return
        if is_current and isinstance(event, Refused):
            self._take_refusal(flight, event, output)
            return
        new_events: list[RequestEvent] = []
        flight.ledger.take([event], new_events)
        if is_current and isinstance(event, Admitted):
            flight.is_running = True
        elif is_current and isinstance(event, FirstToken):
            self.router.mark_computed(event.request_id)
        elif is_current and isinstance(event, Token) and flight.exactness is None:
            flight.exactness = self.members[link.address].exactness
        output += self._forget_ended(flight, new_events)

    def _take_refusal(self, flight: FleetRequest, event: Refused, output: list[RequestEvent]) -> None:
        """Try other members if this one is full or leaving. If none is left, a request with output is held."""
        member, error = flight.member, event.error
        if flight.entry.is_cancelled or member is None or not isinstance(error, FULL_ERRORS + LEAVING_ERRORS):
            self._end_refused(flight, event, output)
            return
        flight.refusals[member] = event
        num_untried = len(self.router.membership.ready_members.keys() - flight.refusals.keys())
        is_final = len(flight.refusals) > MAX_NEXT_MEMBERS or (num_untried == 0 and isinstance(error, FULL_ERRORS))
        if is_final and not flight.has_begun:
            self._end_refused(flight, flight.best_refusal(), output)
            return
        output += self._take_back(flight, was_running=False)
        if flight.has_ended:
            return  # the client had cancelled the rest of the request
        if is_final:
            self.held[event.request_id] = flight
        else:
            self._place(flight)

    def _end_refused(self, flight: FleetRequest, event: Refused, output: list[RequestEvent]) -> None:
        new_events: list[RequestEvent] = []
        flight.ledger.take([event], new_events)
        output += self._forget_ended(flight, new_events)

    def _take_back(self, flight: FleetRequest, *, was_running: bool) -> list[RequestEvent]:
        output = flight.take_back(was_running=was_running)
        self.counts.num_quarantined += flight.ledger.num_quarantined
        self._apply_transitions(self.router.unassign(flight.request.request_id))
        return self._forget_ended(flight, output)

    def _forget_ended(self, flight: FleetRequest, events: list[RequestEvent]) -> list[RequestEvent]:
        if any(isinstance(event, Finished | Refused) for event in events):
            request_id = flight.request.request_id
            self.in_flight.pop(request_id, None)
            self.held.pop(request_id, None)
            self._apply_transitions(self.router.end_request(request_id))
        return events

    # -- output --------------------------------------------------------------------------------------------------------

    def _send(self, member: str | None, command: Assign | Cancel | ClearCache | EngineCall) -> None:
        record = None if member is None else self.members.get(member)
        if record is not None:
            record.link.send(command)

    def _emit(self, events: list[RequestEvent]) -> None:
        if events:
            self._listener(events)

    def abandon(self, reason: str) -> None:
        """Refuse all requests that no member has queued, fail all calls, and forget the rest: the gateway closes."""
        self._is_closed = True
        error = EngineDeadError(reason)
        for record in self.members.values():
            record.calls.fail_all(error)
        for request_id, flight in list(self.in_flight.items()):
            del self.in_flight[request_id]
            self.held.pop(request_id, None)
            self._apply_transitions(self.router.end_request(request_id))
            self._emit(flight.ledger.abandon(error))
