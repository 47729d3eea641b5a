"""The members of a gateway: their model cards, their load, and the choice of a member for a request.

`FleetMembers` handles the messages of members and returns the resulting state transitions. It sends nothing.
"""

import logging
from collections import deque
from dataclasses import dataclass, field

from quire.core.digests import Namespace
from quire.engine.calls import PendingCalls
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
"""If two ticks are further apart than this, the gateway process itself was suspended."""


@dataclass(slots=True)
class KnownMember:
    """A member that has sent its card."""

    link: LinkToMember
    card: MemberCard
    load: WorkerLoad = field(default_factory=WorkerLoad)
    state: str = "joining"
    num_received: int = 0
    """Assignments that the member had received at its latest report."""
    num_gateways: int = 1
    """Gateways connected to the member."""
    calls: PendingCalls = field(default_factory=PendingCalls)
    unacknowledged_s: deque[float] = field(default_factory=deque)
    """Send times of the assignments that are not yet in `num_received`."""

    @property
    def exactness(self) -> str:
        """Members with equal values compute bitwise equal results. A member that reports none gets a unique value."""
        return self.card.info.exactness or f"only {self.link.address} {self.card.incarnation}"


class FleetMembers:
    """All connected members, by address."""

    def __init__(self, salt: str, suspect_after_s: float, clock: Clock) -> None:
        # gone_after_s=0: requests leave a silent member as soon as it is suspected.
        self.router = Router(Membership(suspect_after_s, gone_after_s=0.0), salt=salt)
        self.known: dict[str, KnownMember] = {}
        self.info: ModelInfo | None = None
        """Model info of the first member: all others must run the same model, and block names include it."""
        self._own_info: ModelInfo | None = None
        """Model info of the first quire member."""
        self._clock = clock
        self._advanced_s: float | None = None

    def welcome(self, link: LinkToMember, card: MemberCard) -> None:
        """Add a new member. Raises MessageError if the member is rejected."""
        check_card(card)
        if link.address in self.known:
            raise MessageError("expected one Welcome from a member, got a second one")
        if not link.is_openai:
            self._own_info = self._checked(link.address, card.info)
        self.info = self.info or card.info
        self.known[link.address] = KnownMember(link, card)
        self.router.join(link.address, card.info.block_size, self._clock())
        log.info("member %s joined: %s", link.address, card.info.line)

    def _checked(self, address: str, info: ModelInfo) -> ModelInfo:
        """Return the first quire member's info. Raises MessageError if `info` is of another model."""
        first = self._own_info or info
        if info.identity.fingerprint != first.identity.fingerprint:
            models = f"{address} runs {info.identity.fingerprint}, the others {first.identity.fingerprint}"
            raise MessageError(f"expected members of one name to run the same model; {models}", code="another_model")
        # If an OpenAI member came first, the size is the tokenizer's; a model may have more embedding rows.
        least = info.vocabulary_size if self.info is None else self.info.vocabulary_size
        if info.vocabulary_size < least or info.vocabulary_size != first.vocabulary_size:
            sizes = f"{address} has {info.vocabulary_size}, the others {max(least, first.vocabulary_size)}"
            rule = f"expected members of one name to have the same vocabulary size; {sizes}"
            raise MessageError(rule, code="another_vocabulary_size")
        return first

    def beat(self, member: str, state: str) -> tuple[Transition, ...]:
        """Handle a heartbeat with the member's state; return the resulting transitions."""
        known = self.known.get(member)
        if known is None:
            return ()  # the member has drained and is about to exit
        before, known.state, now_s = self.router.membership.state_of(member), state, self._clock()
        if state == "draining" and before is not MemberState.DRAINING:
            return self.router.drain(member)
        if state == "ready" and before is MemberState.JOINING:
            return (self.router.ready(member, now_s),)
        if state == "ready" or before in (MemberState.DRAINING, MemberState.JOINING):
            back = self.router.beat(member, now_s)
            return () if back is None else (back,)
        # The member restarts its worker. Its requests move if the member is not ready again soon.
        return self.router.doubt(member)

    def report(self, member: str, report: MemberReport) -> None:
        """Record a member's load report. Raises MessageError if it is invalid."""
        known = self.known.get(member)
        if known is None:
            return
        num_new = report.num_received - known.num_received
        if not 0 <= num_new <= len(known.unacknowledged_s):
            limit = known.num_received + len(known.unacknowledged_s)
            rule = f"expected {member} to report {known.num_received} to {limit} received requests"
            raise MessageError(f"{rule}, got {report.num_received}")
        known.load, known.num_received, known.num_gateways = report.load, report.num_received, report.num_gateways
        for _ in range(num_new):
            known.unacknowledged_s.popleft()
        # Assignments that the member had not received are not in its report, so they are still counted here.
        as_of_s = known.unacknowledged_s[0] if known.unacknowledged_s else self._clock()
        self.router.loads.report(member, report.num_uncomputed_tokens, as_of_s)
        self.router.num_gateways = max(1, report.num_gateways)

    def advance(self, now_s: float) -> tuple[Transition, ...]:
        """Suspect silent members. After a suspension of this process all members get the full timeout again, because
        no heartbeat could arrive."""
        last_s, self._advanced_s = self._advanced_s, now_s
        if last_s is not None and now_s - last_s > LATE_S:
            for member in self.known:
                if self.router.membership.state_of(member) is not MemberState.SUSPECT:
                    self.router.beat(member, now_s)
        return self.router.advance(now_s)

    def drain(self, member: str) -> tuple[Transition, ...]:
        """Send this member no new requests."""
        state = self.router.membership.state_of(member)
        return () if state in (MemberState.GONE, MemberState.DRAINING) else self.router.drain(member)

    def note_assignment(self, member: str, now_s: float) -> None:
        """Record that an assignment was sent to a member."""
        self.known[member].unacknowledged_s.append(now_s)

    def choose(self, flight: FleetRequest, now_s: float) -> RoutingChoice | None:
        """Choose among the ready members that have not refused the request and whose maximum length it fits."""
        tokens, ready = flight.tokens, self.router.membership.ready_members
        prompt = self.routed(flight.request.request_id, flight.request.namespace, tokens, flight.names)
        able = self._able(flight)
        unable = ready.keys() - able
        if len(unable) == len(ready) and not flight.has_begun and not self._may_come(flight, able):
            unable = set()  # no member can ever serve it: any member returns the error
        exclude = flight.refusals.keys() | unable
        if flight.exactness is None:
            return self.router.choose(prompt, now_s, exclude)
        # Prefer members with bitwise equal results; fall back to members with different numerics.
        others = {one for one in ready if self.known[one].exactness != flight.exactness}
        return self.router.choose(prompt, now_s, exclude | others) or self.router.choose(prompt, now_s, exclude)

    def _able(self, flight: FleetRequest) -> set[str]:
        num_tokens = len(flight.tokens)
        able = {one for one, known in self.known.items() if known.card.info.max_sequence_tokens > num_tokens}
        return able - self.openai_members if flight.is_for_quire_alone else able

    def _may_come(self, flight: FleetRequest, able: set[str]) -> bool:
        """Whether to hold the request because a member may come that can serve it: one is loading or suspect, or the
        request needs a quire member, at least one has connected, and none is ready now."""
        is_there = bool(self.router.membership.ready_members.keys() - self.openai_members)
        are_away = flight.is_for_quire_alone and self._own_info is not None and not is_there
        return are_away or any(map(self._may_be_ready_soon, able))

    def _may_be_ready_soon(self, member: str) -> bool:
        return self.router.membership.state_of(member) in (MemberState.JOINING, MemberState.SUSPECT)

    @property
    def openai_members(self) -> set[str]:
        return {address for address, known in self.known.items() if known.link.is_openai}

    def routed(
        self, request_id: str, namespace: Namespace, tokens: tuple[int, ...], names: dict[int, tuple[int, ...]]
    ) -> RoutedPrompt:
        """Build the router's view of a request. Block names are computed once per block size and kept in `names`."""
        for size in {known.card.info.block_size for known in self.known.values()}:
            if len(names.get(size, ())) < len(tokens) // size:
                root = root_name(namespace.model, namespace.adapter, namespace.cache_group)
                names[size] = names_of(root, tokens, size)
        return RoutedPrompt(request_id, max(1, len(tokens)), names)
