"""The third way behind a client's port: many members, and a router that chooses among them.

    submit ─► a ledger of its own ─► router chooses ─► link ─► member
      ▲            │                                             │
      └─ events ◄──┴── what is new to the client ◄── events ◄────┘     member gone: the ledger asks another for the rest

A request's ledger keeps what its client was told. When its member is killed, hung or cut off, the request is chosen for
again as prompt and tokens, and the client sees the next token and nothing of this; what the old member still says is
of an old epoch and is dropped. A request that was running on three members that died, with no token between, is ended.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from time import monotonic

from quire.core.digests import Namespace
from quire.core.events import Admitted, Explained, Finished, FirstToken, Refused, RequestEvent, Token
from quire.core.request import Request
from quire.core.share_types import Verdict
from quire.engine.commands import Cancel, ClearCache, Explain, Restore, Submit
from quire.engine.engine import ModelInfo
from quire.engine.port import Listener
from quire.errors import DrainingError, EngineDeadError, MessageError, QueueFullError
from quire.fleet.choice import RoutedPrompt, Router, RoutingChoice
from quire.fleet.fleet_messages import Assign, MemberBeat, MemberCard, MemberStepped, ModelWords, ToGateway, Welcome
from quire.fleet.member_link import MemberLink
from quire.fleet.membership import Membership, MemberState, Transition
from quire.fleet.names import names_of, root_name
from quire.worker.ledger import Ledger
from quire.worker.messages import WorkerLoad

log = logging.getLogger("quire.fleet")

TICK_S = 0.25
MAX_TRIES = 3
"""Members that may say they have no room, before the client is told."""
TRY_ANOTHER = (QueueFullError, DrainingError, EngineDeadError)
"""Refusals that are about the member and not about the request."""


@dataclass(slots=True)
class KnownMember:
    """A member that has said who it is."""

    link: MemberLink
    card: MemberCard
    load: WorkerLoad = field(default_factory=WorkerLoad)
    state: str = "joining"


@dataclass(slots=True)
class _Flight:
    """One request on its way."""

    request: Request
    ledger: Ledger
    member: str | None = None
    is_running: bool = False
    """Its member says that it has begun with it."""
    exactness: str | None = None
    """Of the member that produced its first token."""
    refused_by: set[str] = field(default_factory=set)
    names: dict[int, tuple[int, ...]] = field(default_factory=dict)

    @property
    def tokens(self) -> tuple[int, ...]:
        """What a member has to have computed before it goes on: with several answers, what they have in common."""
        left = self.ledger.entries[self.request.request_id].left
        return self.request.prompt + (left[0].produced if len(left) == 1 else ())


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

    def __init__(self, listener: Listener, max_held: int, salt: str = "") -> None:
        self._listener = listener
        self._max_held = max_held
        # Streams of a member that is not heard of move as soon as nobody would give it new work.
        self.router = Router(Membership(gone_after_s=0.0), salt=salt)
        self.members: dict[str, KnownMember] = {}
        self.info: ModelInfo | None = None
        """Of the first member: all others must compute the same model."""
        self.words: asyncio.Future[ModelWords] | None = None
        self._flights: dict[str, _Flight] = {}
        self._held: dict[str, _Flight] = {}
        """Those that no member has, because there is none."""
        self._questions: dict[str, str] = {}
        """Question -> the member that was asked."""
        self.verdicts: Sequence[Verdict] = ()
        self._num_moved = self._num_moved_inexact = self._num_quarantined = 0
        self.is_draining = False
        self.on_change: Callable[[], None] = lambda: None
        """Told when somebody may have become ready or have left."""

    @property
    def counts(self) -> FleetCounts:
        """For metrics."""
        return FleetCounts(self._num_moved, self._num_moved_inexact, self._num_quarantined)

    @property
    def num_open(self) -> int:
        """Requests that have not had their last event."""
        return len(self._flights)

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
            self._listener([Refused.of(request.request_id, refusal)])
            return
        flight = _Flight(request, Ledger(1 << 31 if self.info is None else self.info.vocabulary_size))
        flight.ledger.add(request)
        self._flights[request.request_id] = flight
        self._tell(self._place(flight))

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
        best = self.router.best(self._routed(question_id, namespace, prompt, {}))
        if best is None:
            error = EngineDeadError("there is no member at this moment; ask again when one is ready")
            self._listener([Refused.of(question_id, error)])
            return
        self._questions[question_id] = best.member
        self._say(best.member, Explain(question_id, namespace, prompt))

    # -- members -------------------------------------------------------------------------------------------------------

    def hear(self, link: MemberLink, message: ToGateway) -> None:
        """What a link brings. Raises MessageError for what cannot be."""
        match message:
            case Welcome(_, card):
                self._welcomed(link, card)
            case MemberStepped(events, load, num_uncomputed_tokens):
                self._stepped(link, events)
                self._loaded(link.address, load, num_uncomputed_tokens)
            case MemberBeat(state, load, num_uncomputed_tokens):
                self._beaten(link.address, state)
                self._loaded(link.address, load, num_uncomputed_tokens)
            case ModelWords():
                if self.words is not None and not self.words.done():
                    self.words.set_result(message)

    def lost(self, link: MemberLink, why: str) -> None:
        """Nothing more comes over this link."""
        if self.members.pop(link.address, None) is not None:
            log.warning("member %s is gone: %s", link.address, why)
            self._followed(self.router.leave(link.address))

    def tick(self, now_s: float) -> None:
        """Judge who is silent, and end who is held too long. To be called a few times a second."""
        self._followed(self.router.advance(now_s))
        for flight in list(self._held.values()):
            self._tell(self._forget_ended(flight, flight.ledger.expire(now_s)))

    def drain(self, member: str) -> None:
        """It gets nothing new."""
        if self.router.membership.state_of(member) in (MemberState.READY, MemberState.SUSPECT, MemberState.JOINING):
            self._followed(self.router.drain(member))

    def _welcomed(self, link: MemberLink, card: MemberCard) -> None:
        identity = card.info.identity
        if self.info is None:
            self.info = card.info
        elif identity.fingerprint != self.info.identity.fingerprint:
            raise MessageError(
                f"all members of one name must compute the same model; {link.address} computes {identity.fingerprint}, "
                f"the others {self.info.identity.fingerprint}"
            )
        self.members[link.address] = KnownMember(link, card)
        self.router.join(link.address, card.info.block_size, monotonic())
        log.info("member %s is there: %s", link.address, card.info.line)

    def _beaten(self, member: str, state: str) -> None:
        known = self.members.get(member)
        if known is None:
            return
        before, known.state, now_s = self.router.membership.state_of(member), state, monotonic()
        if state == "ready" and before is MemberState.JOINING:
            self.router.ready(member, now_s)
            self._place_held()
            self.on_change()
        elif state == "ready":
            if self.router.beat(member, now_s) is not None:
                self._place_held()
        elif state == "draining" and before is not MemberState.DRAINING:
            self.drain(member)
        elif state == "draining":
            self.router.beat(member, now_s)

    def _loaded(self, member: str, load: WorkerLoad | None, num_uncomputed_tokens: int | None) -> None:
        known = self.members.get(member)
        if known is not None and load is not None:
            known.load = load
        if known is not None and num_uncomputed_tokens is not None:
            self.router.loads.report(member, num_uncomputed_tokens, monotonic())

    def _followed(self, transitions: Iterable[Transition]) -> None:
        """Whoever is gone has its requests taken from it."""
        for one in transitions:
            if one.after is MemberState.GONE:
                self._move_all(one.member)
                known = self.members.pop(one.member, None)
                if known is not None:
                    known.link.end("it was not heard any more")
                self.on_change()

    def _move_all(self, member: str) -> None:
        dead = EngineDeadError(f"the member that was asked is gone: {member}")
        gone = [question for question, asked in self._questions.items() if asked == member]
        for question in gone:
            del self._questions[question]
        self._tell([Refused.of(question, dead) for question in gone])
        for flight in [one for one in self._flights.values() if one.member == member]:
            flying = [flight.request.request_id] if flight.is_running else []
            told = flight.ledger.crash(flying)
            self._num_quarantined += flight.ledger.num_quarantined
            self._take_from_member(flight)
            self._num_moved += 1
            self._tell(self._forget_ended(flight, told))
            if flight.request.request_id in self._flights:
                self._tell(self._place(flight))

    # -- requests ------------------------------------------------------------------------------------------------------

    def _place(self, flight: _Flight) -> list[RequestEvent]:
        """Choose and send; what is to be told if that cannot be."""
        request, now_s = flight.request, monotonic()
        choice = self._choice(flight, now_s)
        if choice is None:
            self._held[request.request_id] = flight
            return []
        self._held.pop(request.request_id, None)
        flight.member, flight.is_running = choice.member, False
        num_uncached = len(flight.tokens) - choice.num_cached_tokens
        for command in flight.ledger.due(now_s):
            if isinstance(command, Submit | Restore):
                self._say(choice.member, Assign(command, num_uncached))
        return []

    def _choice(self, flight: _Flight, now_s: float) -> RoutingChoice | None:
        tokens, ready = flight.tokens, self.router.membership.ready_members
        prompt = self._routed(flight.request.request_id, flight.request.namespace, tokens, flight.names)
        small = {
            member
            for member in ready
            if self.members[member].card.info.max_sequence_tokens <= len(tokens)
            or self.members[member].card.info.vocabulary_size < (0 if self.info is None else self.info.vocabulary_size)
        }
        exclude = flight.refused_by | small
        if flight.exactness is not None:
            # Bits that would be the same come first; an answer with others is better than none.
            others = {one for one in ready if self._exactness(one) != flight.exactness}
            choice = self.router.choose(prompt, now_s, exclude | others)
            if choice is not None:
                return choice
            choice = self.router.choose(prompt, now_s, exclude)
            if choice is not None:
                self._num_moved_inexact += 1
                log.warning("request %s goes on with a member of other bits", flight.request.request_id)
            return choice
        return self.router.choose(prompt, now_s, exclude)

    def _exactness(self, member: str) -> str:
        """One that cannot tell is like no other."""
        card = self.members[member].card
        return card.info.exactness or f"only {member} {card.life}"

    def _routed(
        self, request_id: str, namespace: Namespace, tokens: tuple[int, ...], names: dict[int, tuple[int, ...]]
    ) -> RoutedPrompt:
        """Names are made once for each block size that members have."""
        for size in {known.card.info.block_size for known in self.members.values()}:
            if len(names.get(size, ())) < len(tokens) // size:
                root = root_name(namespace.model, namespace.adapter, namespace.cache_group)
                names[size] = names_of(root, tokens, size)
        return RoutedPrompt(request_id, len(tokens), names)

    def _place_held(self) -> None:
        for flight in list(self._held.values()):
            self._tell(self._place(flight))

    def _stepped(self, link: MemberLink, events: Sequence[RequestEvent]) -> None:
        told: list[RequestEvent] = []
        try:
            for event in events:
                self._take(link, event, told)
        finally:
            self._tell(told)

    def _take(self, link: MemberLink, event: RequestEvent, told: list[RequestEvent]) -> None:
        if isinstance(event, Explained | Refused) and self._questions.get(event.request_id) == link.address:
            del self._questions[event.request_id]
            told.append(event)
            return
        flight = self._flights.get(event.request_id)
        if flight is None or flight.member != link.address:
            return  # of an assignment that is over
        if isinstance(event, Refused) and self._tries_another(flight, event, told):
            return
        new: list[RequestEvent] = []
        flight.ledger.take([event], new)
        if isinstance(event, Admitted):
            flight.is_running = True
        elif isinstance(event, FirstToken):
            self.router.computed(event.request_id)
        elif isinstance(event, Token) and flight.exactness is None:
            flight.exactness = self._exactness(link.address)
        told += self._forget_ended(flight, new)

    def _tries_another(self, flight: _Flight, event: Refused, told: list[RequestEvent]) -> bool:
        """A member without room, or one that is leaving: the next one is asked, if there is one."""
        entry = flight.ledger.entries[event.request_id]
        if event.epoch != entry.epoch or entry.is_cancelled or not isinstance(event.error, TRY_ANOTHER):
            return False
        flight.refused_by.add(flight.member or "")
        others = self.router.membership.ready_members.keys() - flight.refused_by
        if len(flight.refused_by) >= MAX_TRIES or not others:
            return False
        told += flight.ledger.crash([])
        self._take_from_member(flight)
        told += self._place(flight)
        return True

    def _take_from_member(self, flight: _Flight) -> None:
        flight.member = None
        for one in self.router.moved(flight.request.request_id):
            self._followed((one,))

    def _forget_ended(self, flight: _Flight, events: list[RequestEvent]) -> list[RequestEvent]:
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
        """There will be no member any more."""
        error = EngineDeadError(why)
        for flight in list(self._flights.values()):
            self._tell(flight.ledger.abandon(error))
        self._flights.clear()
        self._held.clear()
