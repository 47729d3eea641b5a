"""A member's service for gateways: takes their assignments, and sends each the events of its own. No sockets.

    gateway ─┐                ┌─► supervisor ─► worker
    gateway ─┼─► the service ─┤
    gateway ─┘       ▲        └── events of requests
                     └────────────────────┘

Every assignment has a short name of its own here: two gateways may use the same request id, and the same request may
come again while the one before is still being ended. A gateway that was silent for a while, or cannot be reached,
needs nothing any more: its requests are ended.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from msgspec.structs import replace

from quire.core.digests import Namespace
from quire.core.events import Admitted, Finished, FirstToken, Refused, Replayed, RequestEvent
from quire.core.request import Request
from quire.engine.calls import CallOp, CallReply, CallResult, EngineCall, Explain, OnReply
from quire.engine.commands import Cancel, ClearCache, Restore, Submit
from quire.engine.engine import Clock
from quire.errors import DrainingError, MessageError, QuireError, RequestError
from quire.fleet.protocol.messages import (
    PROTOCOL,
    Assign,
    GatewayBeat,
    Goodbye,
    GoodbyeAck,
    Hello,
    MemberBeat,
    MemberCard,
    MemberReport,
    MemberStepped,
    RequestTextAssets,
    TextAssets,
    ToGateway,
    ToMember,
    Welcome,
)
from quire.fleet.protocol.validation import MAX_ID_CHARS, check_assignment, check_tokens
from quire.worker.messages import WorkerLoad
from quire.worker.parent.supervisor import State

log = logging.getLogger("quire.fleet")

MAX_SILENT_S = 10.0
"""The requests of a gateway that was silent for so long are ended."""
REPORT_EVERY_S = 0.1
MAX_NAME_CHARS = 64

SendTo = Callable[[bytes, ToGateway], bool]
"""Send a message to a gateway; false if it cannot be reached."""


class SupervisedPort(Protocol):
    """What the service needs of a supervisor."""

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

    def call(self, op: CallOp, on_reply: OnReply) -> None:
        """Query its engine."""
        ...

    def clear_cache(self) -> None:
        """Drop every unused cached block."""
        ...


@dataclass(slots=True)
class _Taken:
    """One assignment of a gateway's."""

    gateway: bytes
    request_id: str
    epoch: int
    num_prompt_tokens: int = 0
    num_uncomputed: int = 0
    """Prompt tokens still to be computed: by the gateway's estimate, until it is admitted."""


@dataclass(slots=True)
class _Gateway:
    """A gateway that has sent Hello."""

    name: str
    last_received_s: float
    names: dict[str, str] = field(default_factory=dict)
    """Its requests that are open here -> the name of the latest assignment of each."""
    num_received: int = 0
    """Assignments."""
    reported_s: float = float("-inf")
    num_reported_tokens: int = 0
    """In the latest report to it."""


class MemberService:
    """Serves gateways with one supervisor. Lives on the supervisor's event loop."""

    def __init__(
        self, supervisor: SupervisedPort, card: MemberCard, text_assets: TextAssets, send: SendTo, clock: Clock
    ) -> None:
        self._supervisor = supervisor
        self._card = card
        self._text_assets = text_assets
        self._send_to = send
        self._clock = clock
        self._gateways: dict[bytes, _Gateway] = {}
        self.assignments: dict[str, _Taken] = {}
        """Own name -> its assignment."""
        self._num_names = 0
        self._num_uncomputed = 0
        """Prompt tokens of all of them that are still to be computed."""
        self.is_draining = False
        self._unacknowledged: set[bytes] = set()
        """Gateways that have not acknowledged the goodbye."""

    @property
    def num_gateways(self) -> int:
        """Connected gateways."""
        return len(self._gateways)

    @property
    def num_open(self) -> int:
        """Assignments that have not had their last event."""
        return len(self.assignments)

    @property
    def num_uncomputed_tokens(self) -> int:
        """Prompt tokens that are still to be computed, of all gateways' requests."""
        return self._num_uncomputed

    # -- from gateways -------------------------------------------------------------------------------------------------

    def receive(self, identity: bytes, message: ToMember) -> None:
        """Handle a message of a gateway. Raises MessageError for an invalid one."""
        if isinstance(message, Hello):
            self._welcome(identity, message)
            return
        gateway = self._gateways.get(identity)
        if gateway is None:
            raise MessageError("expected Hello as a gateway's first message", code="hello_missing")
        gateway.last_received_s = self._clock()
        match message:
            case Assign(command, num_uncached_tokens):
                gateway.num_received += 1
                self._assign(identity, gateway, command, num_uncached_tokens)
            case Cancel(request_id, index):
                if request_id in gateway.names:
                    self._supervisor.cancel(gateway.names[request_id], index)
            case EngineCall():
                self._call(identity, gateway, message)
            case ClearCache():
                self._supervisor.clear_cache()
            case RequestTextAssets():
                self._send(identity, self._text_assets)
            case GoodbyeAck():
                self._unacknowledged.discard(identity)
            case GatewayBeat():
                pass

    def send_goodbye(self) -> None:
        """Send the last message; each gateway acknowledges it."""
        self._unacknowledged = set(self._gateways)
        for identity in list(self._unacknowledged):
            self._send(identity, Goodbye())

    @property
    def is_goodbye_acknowledged(self) -> bool:
        """Whether all connected gateways have received everything."""
        return not self._unacknowledged & self._gateways.keys()

    def drain(self) -> None:
        """Take nothing new, and send gateways the new state."""
        self.is_draining = True
        self.beat()

    def beat(self) -> None:
        """Send a heartbeat to all gateways."""
        for identity in list(self._gateways):
            self._beat_to(identity)

    def forget_silent(self) -> None:
        """End the requests of gateways that were silent for long."""
        now_s = self._clock()
        for identity, gateway in list(self._gateways.items()):
            if now_s - gateway.last_received_s > MAX_SILENT_S:
                log.warning("no heartbeat from gateway %s for %g s", gateway.name, MAX_SILENT_S)
                self.forget(identity)

    def forget(self, identity: bytes) -> None:
        """A gateway that is gone, or restarts its session: its requests are ended."""
        if self._gateways.pop(identity, None) is None:
            return
        for name in [name for name, taken in self.assignments.items() if taken.gateway == identity]:
            self._expect(self.assignments.pop(name), 0)
            self._supervisor.cancel(name)

    def _welcome(self, identity: bytes, hello: Hello) -> None:
        name = hello.gateway[:MAX_NAME_CHARS]
        if hello.protocol != PROTOCOL:
            log.warning("gateway %s uses protocol %d, this member %d", name, hello.protocol, PROTOCOL)
        self.forget(identity)
        self._gateways[identity] = _Gateway(name, self._clock())
        self._send(identity, Welcome(PROTOCOL, self._card))
        self._beat_to(identity)

    def _assign(self, identity: bytes, gateway: _Gateway, command: Submit | Restore, num_uncached_tokens: int) -> None:
        """Submit one request, in this member's own namespace."""
        before = self.assignments.get(gateway.names.get(command.request_id, ""))
        if before is not None and command.epoch <= before.epoch:
            raise MessageError(f"expected an epoch after {before.epoch}, got {command.epoch}", code="stale_epoch")
        if before is not None:
            self._supervisor.cancel(gateway.names[command.request_id])
        try:
            own = self._checked(command)
        except QuireError as error:
            self._send(identity, MemberStepped((Refused.of(command.request_id, error, command.epoch),)))
            return
        # Short, whatever the gateway's id is: a worker writes the names of all that run onto one page.
        self._num_names += 1
        name = gateway.names[command.request_id] = f"assignment-{self._num_names}"
        taken = self.assignments[name] = _Taken(identity, command.request_id, command.epoch, len(command.prompt))
        self._expect(taken, min(max(num_uncached_tokens, 0), len(command.prompt)))
        self._supervisor.submit(replace(command.received(self._clock()), request_id=name, namespace=own))

    def _checked(self, command: Submit | Restore) -> Namespace:
        """This member's name of the request's namespace. Raises the refusal for the gateway."""
        wanted, info = command.namespace, self._card.info
        own = info.namespace(wanted.cache_group, wanted.adapter)
        if len(command.request_id) > MAX_ID_CHARS:
            num_chars = len(command.request_id)
            raise RequestError(f"expected a request id of up to {MAX_ID_CHARS} characters, got {num_chars}")
        if (wanted.format_version, wanted.model) != (own.format_version, own.model):
            raise RequestError(f"expected a request for {own.model}, got one for {wanted.model[:MAX_ID_CHARS]}")
        check_assignment(command, info)
        if self.is_draining:
            raise DrainingError("this member is shutting down and takes no new requests; use another one")
        return own

    def _call(self, identity: bytes, gateway: _Gateway, call: EngineCall) -> None:
        """A query in this member's own namespace."""

        def on_reply(result: CallResult | QuireError) -> None:
            if self._gateways.get(identity) is gateway:  # the same session
                self._send(identity, CallReply.of(call.call_id, result))

        op, info = call.op, self._card.info
        if not isinstance(op, Explain):
            raise MessageError(f"expected an Explain call, got {type(op).__name__}", code="unsupported_call")
        try:
            check_tokens("a prompt", op.prompt, info.vocabulary_size)
        except RequestError as error:
            self._send(identity, CallReply.of(call.call_id, error))
            return
        own = info.namespace(op.namespace.cache_group, op.namespace.adapter)
        self._supervisor.call(replace(op, namespace=own), on_reply)

    # -- from the supervisor -------------------------------------------------------------------------------------------

    def listener(self, events: Sequence[RequestEvent]) -> None:
        """Events of the supervisor, sorted by gateway, under the gateways' own request ids."""
        by_gateway: dict[bytes, list[RequestEvent]] = {}
        for event in events:
            taken = self.assignments.get(event.request_id)
            if taken is None:
                continue  # its gateway is gone
            renamed = replace(event, request_id=taken.request_id, epoch=taken.epoch)
            by_gateway.setdefault(taken.gateway, []).append(renamed)
            if isinstance(event, Admitted):
                self._expect(taken, max(0, taken.num_prompt_tokens - event.num_cached_tokens))
            elif isinstance(event, Replayed):
                self._expect(taken, taken.num_prompt_tokens)
            elif isinstance(event, FirstToken):
                self._expect(taken, 0)
            elif isinstance(event, Finished | Refused):
                self._end(event.request_id, taken)
        now_s = self._clock()
        for identity, its_events in by_gateway.items():
            gateway = self._gateways.get(identity)
            if gateway is None:
                continue
            # The load here decides where the next request goes: a changed one is reported at once.
            is_due = self._num_uncomputed != gateway.num_reported_tokens or now_s - gateway.reported_s >= REPORT_EVERY_S
            self._send(identity, MemberStepped(tuple(its_events), self._report(gateway, now_s) if is_due else None))

    def _expect(self, taken: _Taken, num_uncomputed: int) -> None:
        self._num_uncomputed += num_uncomputed - taken.num_uncomputed
        taken.num_uncomputed = num_uncomputed

    def _end(self, name: str, taken: _Taken) -> None:
        del self.assignments[name]
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
        return MemberReport(self._supervisor.load, self._num_uncomputed, gateway.num_received, len(self._gateways))

    def _send(self, identity: bytes, message: ToGateway) -> None:
        if identity in self._gateways and not self._send_to(identity, message):
            self.forget(identity)
