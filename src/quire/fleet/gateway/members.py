"""The members that a gateway knows: who each says it is, how busy it is, and who of them suits a request.

What members say comes in; what follows from it for those who have requests comes back as transitions. Sends nothing.
"""

import logging
from collections import deque
from dataclasses import dataclass, field

from quire.core.digests import Namespace
from quire.engine.engine import Clock, ModelInfo
from quire.errors import MessageError
from quire.fleet.gateway.request import FleetRequest
from quire.fleet.protocol.link import LinkToMember
from quire.fleet.protocol.messages import MemberCard, MemberReport
from quire.fleet.protocol.validation import check_card
from quire.fleet.routing.block_names import names_of, root_name
from quire.fleet.routing.membership import Membership, MemberState, Transition
from quire.fleet.routing.router import RoutedPrompt, Router, RoutingChoice
from quire.worker.messages import WorkerLoad

log = logging.getLogger("quire.fleet")

LATE_S = 1.0
"""A tick that comes so late after the one before: it was this process that did not run."""


@dataclass(slots=True)
class KnownMember:
    """A member that has said who it is."""

    link: LinkToMember
    card: MemberCard
    load: WorkerLoad = field(default_factory=WorkerLoad)
    state: str = "joining"
    num_heard: int = 0
    """Assignments that it had heard when it reported last."""
    num_gateways: int = 1
    """That it hears."""
    unheard_s: deque[float] = field(default_factory=deque)
    """When those after them were sent."""

    @property
    def exactness(self) -> str:
        """What others must say as well who give the same bits. One that cannot tell is like no other."""
        return self.card.info.exactness or f"only {self.link.address} {self.card.incarnation}"


class FleetMembers:
    """All that are there, by their addresses."""

    def __init__(self, salt: str, suspect_after_s: float, clock: Clock) -> None:
        # Streams of a member that is not heard of move as soon as nobody would give it new work.
        self.router = Router(Membership(suspect_after_s, gone_after_s=0.0), salt=salt)
        self.known: dict[str, KnownMember] = {}
        self.info: ModelInfo | None = None
        """Of the first: all others must compute the same model, and it names the blocks of all."""
        self._own_info: ModelInfo | None = None
        """Of the first that is quire."""
        self._clock = clock
        self._advanced_s: float | None = None

    def welcome(self, link: LinkToMember, card: MemberCard) -> None:
        """One that was not there before. Raises MessageError for one that is not let in."""
        check_card(card)
        if link.address in self.known:
            raise MessageError("a member says welcome once")
        if not link.is_stranger:
            self._own_info = self._checked(link.address, card.info)
        self.info = self.info or card.info
        self.known[link.address] = KnownMember(link, card)
        self.router.join(link.address, card.info.block_size, self._clock())
        log.info("member %s is there: %s", link.address, card.info.line)

    def _checked(self, address: str, info: ModelInfo) -> ModelInfo:
        """Of the first that is quire. Raises MessageError for another that computes something else."""
        first = self._own_info or info
        if info.identity.fingerprint != first.identity.fingerprint:
            raise MessageError(
                f"all members of one name must compute the same model; {address} computes "
                f"{info.identity.fingerprint}, the others {first.identity.fingerprint}"
            )
        # Where strangers came first, the tokenizer has said how many there are: a model may have more rows than that.
        least = info.vocabulary_size if self.info is None else self.info.vocabulary_size
        if info.vocabulary_size < least or info.vocabulary_size != first.vocabulary_size:
            raise MessageError(
                f"all members of one name must have the same tokens; {address} has {info.vocabulary_size}, "
                f"the others {max(least, first.vocabulary_size)}"
            )
        return first

    def beat(self, member: str, state: str) -> tuple[Transition, ...]:
        """It says how it is."""
        known = self.known.get(member)
        if known is None:
            return ()  # it has drained, and is about to end
        before, known.state, now_s = self.router.membership.state_of(member), state, self._clock()
        if state == "draining" and before is not MemberState.DRAINING:
            return self.router.drain(member)
        if state == "ready" and before is MemberState.JOINING:
            return (self.router.ready(member, now_s),)
        if state == "ready" or before in (MemberState.DRAINING, MemberState.JOINING):
            back = self.router.beat(member, now_s)
            return () if back is None else (back,)
        # Its worker is being replaced. It may come back in a moment; if not, its streams move.
        return self.router.doubt(member)

    def report(self, member: str, report: MemberReport) -> None:
        """How busy it is. Raises MessageError for what cannot be."""
        known = self.known.get(member)
        if known is None:
            return
        num_new = report.num_heard - known.num_heard
        if not 0 <= num_new <= len(known.unheard_s):
            raise MessageError(
                f"{known.num_heard + len(known.unheard_s)} requests were given to {member}, it has heard "
                f"{report.num_heard} after {known.num_heard}"
            )
        known.load, known.num_heard, known.num_gateways = report.load, report.num_heard, report.num_gateways
        for _ in range(num_new):
            known.unheard_s.popleft()
        # What it has not heard of it does not count.
        as_of_s = known.unheard_s[0] if known.unheard_s else self._clock()
        self.router.loads.report(member, report.num_uncomputed_tokens, as_of_s)
        self.router.num_gateways = max(1, report.num_gateways)

    def advance(self, now_s: float) -> tuple[Transition, ...]:
        """Judge who was silent. If this process did not run for a while, nobody could be heard: all get their time
        anew."""
        last_s, self._advanced_s = self._advanced_s, now_s
        if last_s is not None and now_s - last_s > LATE_S:
            for member in self.known:
                if self.router.membership.state_of(member) is not MemberState.SUSPECT:
                    self.router.beat(member, now_s)
        return self.router.advance(now_s)

    def drain(self, member: str) -> tuple[Transition, ...]:
        """It gets nothing new."""
        state = self.router.membership.state_of(member)
        return () if state in (MemberState.GONE, MemberState.DRAINING) else self.router.drain(member)

    def given(self, member: str, now_s: float) -> None:
        """An assignment is on its way to it."""
        self.known[member].unheard_s.append(now_s)

    def choose(self, flight: FleetRequest, now_s: float) -> RoutingChoice | None:
        """Who gets a request now, of those that did not turn it away and have room for its tokens."""
        tokens, ready = flight.tokens, self.router.membership.ready_members
        prompt = self.routed(flight.request.request_id, flight.request.namespace, tokens, flight.names)
        able = self._able(flight)
        unable = ready.keys() - able
        if len(unable) == len(ready) and not flight.has_begun and not self._may_come(flight, able):
            unable = set()  # whoever gets it says why it cannot be
        exclude = flight.refusals.keys() | unable
        if flight.exactness is None:
            return self.router.choose(prompt, now_s, exclude)
        # Bits that would be the same come first; an answer with others is better than none.
        others = {one for one in ready if self.known[one].exactness != flight.exactness}
        return self.router.choose(prompt, now_s, exclude | others) or self.router.choose(prompt, now_s, exclude)

    def _able(self, flight: FleetRequest) -> set[str]:
        """Those that could serve it."""
        num_tokens = len(flight.tokens)
        able = {one for one, known in self.known.items() if known.card.info.max_sequence_tokens > num_tokens}
        return able - self.strangers if flight.is_for_quire_alone else able

    def _may_come(self, flight: FleetRequest, able: set[str]) -> bool:
        """Whether it is worth to wait for one that could serve it: it is on its way, or all that are quire have gone,
        whom it waits for as all requests wait for the last member."""
        is_there = bool(self.router.membership.ready_members.keys() - self.strangers)
        are_away = flight.is_for_quire_alone and self._own_info is not None and not is_there
        return are_away or any(map(self._may_be_ready_soon, able))

    def _may_be_ready_soon(self, member: str) -> bool:
        return self.router.membership.state_of(member) in (MemberState.JOINING, MemberState.SUSPECT)

    @property
    def strangers(self) -> set[str]:
        """Those that are not quire."""
        return {address for address, known in self.known.items() if known.link.is_stranger}

    def routed(
        self, request_id: str, namespace: Namespace, tokens: tuple[int, ...], names: dict[int, tuple[int, ...]]
    ) -> RoutedPrompt:
        """What a router looks at. Names are made once for each block size that members have."""
        for size in {known.card.info.block_size for known in self.known.values()}:
            if len(names.get(size, ())) < len(tokens) // size:
                root = root_name(namespace.model, namespace.adapter, namespace.cache_group)
                names[size] = names_of(root, tokens, size)
        return RoutedPrompt(request_id, max(1, len(tokens)), names)
