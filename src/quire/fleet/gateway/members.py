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

MAX_TICK_GAP_S = 1.0
"""After a longer time between two ticks, this gateway process itself was paused."""


@dataclass(slots=True)
class KnownMember:
    """A connected member: its link, its card, and its latest report."""

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
        """Members with the same value compute bitwise equal results. A member that reports none gets a unique value."""
        return self.card.info.exactness or f"only {self.link.address} {self.card.incarnation}"


class FleetMembers:
    """All connected members, by address."""

    def __init__(self, salt: str, suspect_after_s: float, clock: Clock) -> None:
        # gone_after_s=0: requests leave a silent member as soon as it is suspected.
        self.router = Router(Membership(suspect_after_s, gone_after_s=0.0), salt=salt)
        self.by_address: dict[str, KnownMember] = {}
        self.info: ModelInfo | None = None
        """Model info of the first member: all others must run the same model, and block names include it."""
        self._quire_info: ModelInfo | None = None
        """Model info of the first quire member."""
        self._clock = clock
        self._last_tick_s: float | None = None

    def welcome(self, link: LinkToMember, card: MemberCard) -> None:
        """Add a new member. Raises MessageError if the member is rejected."""
        check_card(card)
        if link.address in self.by_address:
            raise MessageError("expected one Welcome from a member, got a second one")
        if not link.is_openai:
            self._quire_info = self._check_model(link.address, card.info)
        self.info = self.info or card.info
        self.by_address[link.address] = KnownMember(link, card)
        self.router.join(link.address, card.info.block_size, self._clock())
        log.info("member %s joined: %s", link.address, card.info.line)

    def _check_model(self, address: str, info: ModelInfo) -> ModelInfo:
        """Return the first quire member's info. Raises MessageError if `info` is of another model."""
        first = self._quire_info or info
        if info.identity.fingerprint != first.identity.fingerprint:
            got = f"{address} runs {info.identity.fingerprint}, the others {first.identity.fingerprint}"
            raise MessageError(f"expected members of one name to run the same model; {got}", code="another_model")
        # If an OpenAI member came first, the size is the tokenizer's; a model may have more embedding rows.
        min_size = info.vocabulary_size if self.info is None else self.info.vocabulary_size
        if info.vocabulary_size < min_size or info.vocabulary_size != first.vocabulary_size:
            got = f"{address} has {info.vocabulary_size}, the others {max(min_size, first.vocabulary_size)}"
            message = f"expected members of one name to have the same vocabulary size; {got}"
            raise MessageError(message, code="another_vocabulary_size")
        return first

    def handle_heartbeat(self, member: str, state: str) -> tuple[Transition, ...]:
        """Handle a heartbeat with the member's state; return the resulting transitions."""
        record = self.by_address.get(member)
        if record is None:
            return ()  # the member has drained and is about to exit
        old_state, record.state, now_s = self.router.membership.state_of(member), state, self._clock()
        if state == "draining" and old_state is not MemberState.DRAINING:
            return self.router.drain(member)
        if state == "ready" and old_state is MemberState.JOINING:
            return (self.router.mark_ready(member, now_s),)
        if state == "ready" or old_state in (MemberState.DRAINING, MemberState.JOINING):
            transition = self.router.record_heartbeat(member, now_s)
            return () if transition is None else (transition,)
        # The member restarts its worker. Its requests move if the member is not ready again soon.
        return self.router.mark_suspect(member)

    def report(self, member: str, report: MemberReport) -> None:
        """Record a member's load report. Raises MessageError if it is invalid."""
        record = self.by_address.get(member)
        if record is None:
            return
        num_new = report.num_received - record.num_received
        if not 0 <= num_new <= len(record.unacknowledged_s):
            limit = record.num_received + len(record.unacknowledged_s)
            message = f"expected {member} to report {record.num_received} to {limit} received requests"
            raise MessageError(f"{message}, got {report.num_received}")
        record.load, record.num_received, record.num_gateways = report.load, report.num_received, report.num_gateways
        for _ in range(num_new):
            record.unacknowledged_s.popleft()
        # Assignments that the member had not received are not in its report, so they are still counted here.
        as_of_s = record.unacknowledged_s[0] if record.unacknowledged_s else self._clock()
        self.router.loads.report(member, report.num_uncomputed_tokens, as_of_s)
        self.router.num_gateways = max(1, report.num_gateways)

    def advance(self, now_s: float) -> tuple[Transition, ...]:
        """Suspect silent members. If this process was paused, all members get the full timeout again, because no
        heartbeat could arrive meanwhile."""
        last_s, self._last_tick_s = self._last_tick_s, now_s
        if last_s is not None and now_s - last_s > MAX_TICK_GAP_S:
            for member in self.by_address:
                if self.router.membership.state_of(member) is not MemberState.SUSPECT:
                    self.router.record_heartbeat(member, now_s)
        return self.router.advance(now_s)

    def drain(self, member: str) -> tuple[Transition, ...]:
        """Send this member no new requests."""
        state = self.router.membership.state_of(member)
        return () if state in (MemberState.GONE, MemberState.DRAINING) else self.router.drain(member)

    def note_assignment(self, member: str, now_s: float) -> None:
        """Record that an assignment was sent to a member."""
        self.by_address[member].unacknowledged_s.append(now_s)

    def choose(self, flight: FleetRequest, now_s: float) -> RoutingChoice | None:
        """Choose among the ready members that can serve the request and have not refused it; None if there is none."""
        tokens, ready = flight.tokens, self.router.membership.ready_members
        prompt = self.routed_prompt(flight.request.request_id, flight.request.namespace, tokens, flight.names)
        capable = self._capable_members(flight)
        incapable = ready.keys() - capable
        if len(incapable) == len(ready) and not flight.has_begun and not self._may_become_ready(flight, capable):
            incapable = set()  # no member can ever serve it: any member returns the error
        exclude = flight.refusals.keys() | incapable
        if flight.exactness is None:
            return self.router.choose(prompt, now_s, exclude)
        # Prefer members with bitwise equal results; fall back to members with different numerics.
        inexact = {member for member in ready if self.by_address[member].exactness != flight.exactness}
        return self.router.choose(prompt, now_s, exclude | inexact) or self.router.choose(prompt, now_s, exclude)

    def _capable_members(self, flight: FleetRequest) -> set[str]:
        length = len(flight.tokens)
        able = {address for address, record in self.by_address.items() if record.card.info.max_sequence_tokens > length}
        return able - self.openai_members if flight.needs_quire_member else able

    def _may_become_ready(self, flight: FleetRequest, capable: set[str]) -> bool:
        """Whether to hold the request because a member may soon serve it: a capable one is loading or suspect, or the
        request needs a quire member, at least one was connected, and none is ready now."""
        is_one_ready = bool(self.router.membership.ready_members.keys() - self.openai_members)
        needs_quire = flight.needs_quire_member and self._quire_info is not None and not is_one_ready
        return needs_quire or any(map(self._may_be_ready_soon, capable))

    def _may_be_ready_soon(self, member: str) -> bool:
        return self.router.membership.state_of(member) in (MemberState.JOINING, MemberState.SUSPECT)

    @property
    def openai_members(self) -> set[str]:
        return {address for address, record in self.by_address.items() if record.link.is_openai}

    def routed_prompt(
        self, request_id: str, namespace: Namespace, tokens: tuple[int, ...], names: dict[int, tuple[int, ...]]
    ) -> RoutedPrompt:
        """Build the router's view of a request. Block names are computed once per block size and kept in `names`."""
        for size in {record.card.info.block_size for record in self.by_address.values()}:
            if len(names.get(size, ())) < len(tokens) // size:
                root_block_name = root_name(namespace.model, namespace.adapter, namespace.cache_group)
                names[size] = names_of(root_block_name, tokens, size)
        return RoutedPrompt(request_id, max(1, len(tokens)), names)
