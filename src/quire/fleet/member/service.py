"""What a member does for gateways: takes their assignments, and tells each what became of its own. No sockets.

    gateway ─┐              ┌─► supervisor ─► worker
    gateway ─┼─► this desk ─┤
    gateway ─┘       ▲      └── what became of whose requests
                     └──────────────────┘

Every assignment has a short name of its own here: two gateways may call requests alike, and the same request may come
again while the one before is still being ended. A gateway that was not heard for a while, or cannot be reached, wants
nothing any more: what it asked for is ended.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from msgspec.structs import replace

from quire.core.digests import Namespace
from quire.core.events import Admitted, Explained, Finished, FirstToken, Refused, Replayed, RequestEvent
from quire.core.request import Request
from quire.engine.commands import Cancel, ClearCache, Explain, Restore, Submit
from quire.engine.engine import Clock
from quire.engine.loop import received
from quire.errors import DrainingError, MessageError, QuireError, RequestError
from quire.fleet.protocol.messages import (
    PROTOCOL,
    AskWords,
    Assign,
    Farewell,
    FarewellHeard,
    GatewayBeat,
    Hello,
    MemberBeat,
    MemberCard,
    MemberReport,
    MemberStepped,
    ModelWords,
    ToGateway,
    ToMember,
    Welcome,
)
from quire.fleet.protocol.validation import MAX_ID_CHARS, check_assignment, check_tokens
from quire.worker.messages import WorkerLoad
from quire.worker.parent.supervisor import State

log = logging.getLogger("quire.fleet")

UNHEARD_S = 10.0
"""A gateway that was silent for so long wants nothing any more."""
REPORT_EVERY_S = 0.1
MAX_NAME_CHARS = 64

SendTo = Callable[[bytes, ToGateway], bool]
"""Say something to a gateway; false if nobody is there."""


class SupervisedPort(Protocol):
    """What a desk needs of a supervisor."""

    state: State

    @property
    def load(self) -> WorkerLoad:
        """At this moment."""
        ...

    def submit(self, request: Request) -> None:
        """Queue a request."""
        ...

    def cancel(self, request_id: str, index: int | None = None) -> None:
        """End a request, or one of its answers alone."""
        ...

    def explain(self, question_id: str, namespace: Namespace, prompt: tuple[int, ...]) -> None:
        """Ask why a prompt is not in the cache."""
        ...

    def clear_cache(self) -> None:
        """Forget every cached block that nobody uses."""
        ...


@dataclass(slots=True)
class _Taken:
    """One assignment of a gateway's, or a question."""

    gateway: bytes
    request_id: str
    epoch: int
    num_prompt_tokens: int = 0
    num_uncomputed: int = 0
    """Prompt tokens that are still to be computed: what the gateway believes, until it begins."""


@dataclass(slots=True)
class _Gateway:
    """One that has said hello."""

    name: str
    heard_s: float
    names: dict[str, str] = field(default_factory=dict)
    """Its requests and questions that live here -> what the latest assignment of each is called here."""
    num_heard: int = 0
    """Assignments."""
    reported_s: float = float("-inf")
    num_reported_tokens: int = 0
    """What it was told last that is still to be computed here."""


class MemberDesk:
    """Serves gateways with one supervisor. Lives on the supervisor's event loop."""

    def __init__(
        self, supervisor: SupervisedPort, card: MemberCard, words: ModelWords, send: SendTo, clock: Clock
    ) -> None:
        self._supervisor = supervisor
        self._card = card
        self._words = words
        self._send_to = send
        self._clock = clock
        self._gateways: dict[bytes, _Gateway] = {}
        self._taken: dict[str, _Taken] = {}
        """Own name -> what it is of."""
        self._num_names = 0
        self._num_uncomputed = 0
        """Prompt tokens of all of them that are still to be computed."""
        self.is_draining = False
        self._unheard: set[bytes] = set()
        """Gateways that have not said that they heard the farewell."""

    @property
    def num_gateways(self) -> int:
        """Those that were heard lately."""
        return len(self._gateways)

    @property
    def num_open(self) -> int:
        """Assignments and questions that have not had their last event, and whose gateway wants it."""
        return len(self._taken)

    @property
    def num_uncomputed_tokens(self) -> int:
        """Prompt tokens that are still to be computed, of all gateways' requests."""
        return self._num_uncomputed

    # -- from gateways -------------------------------------------------------------------------------------------------

    def hear(self, identity: bytes, message: ToMember) -> None:
        """What a gateway says. Raises MessageError for what cannot be."""
        if isinstance(message, Hello):
            self._greet(identity, message)
            return
        gateway = self._gateways.get(identity)
        if gateway is None:
            raise MessageError("a gateway says hello before it says anything else")
        gateway.heard_s = self._clock()
        match message:
            case Assign(command, num_uncached_tokens):
                gateway.num_heard += 1
                self._assign(identity, gateway, command, num_uncached_tokens)
            case Cancel(request_id, index):
                if request_id in gateway.names:
                    self._supervisor.cancel(gateway.names[request_id], index)
            case Explain():
                self._explain(identity, gateway, message)
            case ClearCache():
                self._supervisor.clear_cache()
            case AskWords():
                self._send(identity, self._words)
            case FarewellHeard():
                self._unheard.discard(identity)
            case GatewayBeat():
                pass

    def farewell(self) -> None:
        """Nothing more will be said; who hears it answers."""
        self._unheard = set(self._gateways)
        for identity in list(self._unheard):
            self._send(identity, Farewell())

    @property
    def is_farewell_heard(self) -> bool:
        """Whether all gateways that are there have heard everything."""
        return not self._unheard & self._gateways.keys()

    def drain(self) -> None:
        """Take nothing new; gateways are told."""
        self.is_draining = True
        self.beat()

    def beat(self) -> None:
        """Tell everybody how this member is."""
        for identity in list(self._gateways):
            self._beat_to(identity)

    def forget_silent(self) -> None:
        """Gateways that were not heard for long want nothing any more."""
        now_s = self._clock()
        for identity, gateway in list(self._gateways.items()):
            if now_s - gateway.heard_s > UNHEARD_S:
                log.warning("gateway %s was not heard for %g s", gateway.name, UNHEARD_S)
                self.forget(identity)

    def forget(self, identity: bytes) -> None:
        """A gateway that is gone, or begins anew: what it asked for is ended."""
        if self._gateways.pop(identity, None) is None:
            return
        for name in [name for name, taken in self._taken.items() if taken.gateway == identity]:
            self._expect(self._taken.pop(name), 0)
            self._supervisor.cancel(name)

    def _greet(self, identity: bytes, hello: Hello) -> None:
        name = hello.gateway[:MAX_NAME_CHARS]
        if hello.protocol != PROTOCOL:
            log.warning("gateway %s speaks protocol %d, this member %d", name, hello.protocol, PROTOCOL)
        self.forget(identity)
        self._gateways[identity] = _Gateway(name, self._clock())
        self._send(identity, Welcome(PROTOCOL, self._card))
        self._beat_to(identity)

    def _assign(self, identity: bytes, gateway: _Gateway, command: Submit | Restore, num_uncached_tokens: int) -> None:
        """One request, in the namespace that this member gives it."""
        before = self._taken.get(gateway.names.get(command.request_id, ""))
        if before is not None and command.epoch <= before.epoch:
            raise MessageError(f"epoch {command.epoch} of a request came after {before.epoch}")
        if before is not None:
            self._supervisor.cancel(gateway.names[command.request_id])
        try:
            own = self._checked(command)
        except QuireError as error:
            self._send(identity, MemberStepped((Refused.of(command.request_id, error, command.epoch),)))
            return
        taken = _Taken(identity, command.request_id, command.epoch, len(command.prompt))
        name = self._take(gateway, taken)
        self._expect(taken, min(max(num_uncached_tokens, 0), len(command.prompt)))
        self._supervisor.submit(replace(received(command, self._clock()), request_id=name, namespace=own))

    def _checked(self, command: Submit | Restore) -> Namespace:
        """What this member calls the request's namespace. Raises what its gateway is told if it is not taken."""
        wanted, info = command.namespace, self._card.info
        own = info.namespace(wanted.cache_group, wanted.adapter)
        if len(command.request_id) > MAX_ID_CHARS:
            raise RequestError(f"a request's id has up to {MAX_ID_CHARS} characters, {len(command.request_id)} given")
        if (wanted.format_version, wanted.model) != (own.format_version, own.model):
            raise RequestError(f"this member computes {own.model}, {wanted.model[:MAX_ID_CHARS]} was asked for")
        check_assignment(command, info)
        if self.is_draining:
            raise DrainingError("this member is going down and takes no new requests; ask another one")
        return own

    def _explain(self, identity: bytes, gateway: _Gateway, question: Explain) -> None:
        if question.question_id in gateway.names or len(question.question_id) > MAX_ID_CHARS:
            raise MessageError("a question has an id of its own, and a short one")
        space, info = question.namespace, self._card.info
        try:
            check_tokens("a prompt", question.prompt, info.vocabulary_size)
        except RequestError as error:
            self._send(identity, MemberStepped((Refused.of(question.question_id, error),)))
            return
        name = self._take(gateway, _Taken(identity, question.question_id, 0))
        self._supervisor.explain(name, info.namespace(space.cache_group, space.adapter), question.prompt)

    def _take(self, gateway: _Gateway, taken: _Taken) -> str:
        # Short, whatever the gateway calls it: a worker writes the names of all that run onto one page.
        self._num_names += 1
        name = gateway.names[taken.request_id] = f"assignment-{self._num_names}"
        self._taken[name] = taken
        return name

    # -- from the supervisor -------------------------------------------------------------------------------------------

    def listener(self, events: Sequence[RequestEvent]) -> None:
        """What the supervisor tells: sorted by whose it is, under the names that the gateways know."""
        by_gateway: dict[bytes, list[RequestEvent]] = {}
        for event in events:
            taken = self._taken.get(event.request_id)
            if taken is None:
                continue  # its gateway is gone
            told = replace(event, request_id=taken.request_id, epoch=taken.epoch)
            by_gateway.setdefault(taken.gateway, []).append(told)
            if isinstance(event, Admitted):
                self._expect(taken, max(0, taken.num_prompt_tokens - event.num_cached_tokens))
            elif isinstance(event, Replayed):
                self._expect(taken, taken.num_prompt_tokens)
            elif isinstance(event, FirstToken):
                self._expect(taken, 0)
            elif isinstance(event, Finished | Refused | Explained):
                self._end(event.request_id, taken)
        now_s = self._clock()
        for identity, its_events in by_gateway.items():
            gateway = self._gateways.get(identity)
            if gateway is None:
                continue
            # By what is to be computed here the next request is sent here or elsewhere: that must not be old news.
            is_due = self._num_uncomputed != gateway.num_reported_tokens or now_s - gateway.reported_s >= REPORT_EVERY_S
            self._send(identity, MemberStepped(tuple(its_events), self._report(gateway, now_s) if is_due else None))

    def _expect(self, taken: _Taken, num_uncomputed: int) -> None:
        self._num_uncomputed += num_uncomputed - taken.num_uncomputed
        taken.num_uncomputed = num_uncomputed

    def _end(self, name: str, taken: _Taken) -> None:
        del self._taken[name]
        self._expect(taken, 0)
        gateway = self._gateways.get(taken.gateway)
        if gateway is not None and gateway.names.get(taken.request_id) == name:
            del gateway.names[taken.request_id]

    # -- to gateways ---------------------------------------------------------------------------------------------------

    def _beat_to(self, identity: bytes) -> None:
        gateway = self._gateways.get(identity)
        if gateway is not None:
            state = State.DRAINING if self.is_draining else self._supervisor.state
            self._send(identity, MemberBeat(state.value, self._report(gateway, self._clock())))

    def _report(self, gateway: _Gateway, now_s: float) -> MemberReport:
        gateway.reported_s, gateway.num_reported_tokens = now_s, self._num_uncomputed
        return MemberReport(self._supervisor.load, self._num_uncomputed, gateway.num_heard, len(self._gateways))

    def _send(self, identity: bytes, message: ToGateway) -> None:
        if identity in self._gateways and not self._send_to(identity, message):
            self.forget(identity)
