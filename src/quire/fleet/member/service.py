"""A member's service for gateways: runs their assignments and returns events to each gateway. No sockets.

    gateway ─┐                ┌─► supervisor ─► worker
    gateway ─┼─► the service ─┤
    gateway ─┘       ▲        └── events of requests
                     └────────────────────┘

The member gives every assignment a short id of its own, because two gateways may use the same request id, and a
gateway may assign a request again while its earlier assignment is still being cancelled. The requests of a gateway that
is silent for `MAX_SILENT_S` or unreachable are cancelled.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from msgspec.structs import replace

from quire.core.digests import Namespace
from quire.core.events import Admitted, Finished, FirstToken, Refused, Replayed, RequestEvent
from quire.engine.calls import CallReply, CallResult, EngineCall, Explain
from quire.engine.commands import Cancel, ClearCache, Restore, Submit
from quire.engine.engine import Clock
from quire.engine.port import EnginePort
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
"""Requests of a gateway are cancelled if it sends nothing for this long."""
REPORT_EVERY_S = 0.1
MAX_NAME_CHARS = 64

SendTo = Callable[[bytes, ToGateway], bool]
"""Sends a message to a gateway; returns false if the gateway is unreachable."""


class SupervisedPort(EnginePort, Protocol):
    """The part of a supervisor that the service uses."""

    state: State

    @property
    def load(self) -> WorkerLoad:
        """The worker's current load."""
        ...


@dataclass(slots=True)
class _Taken:
    """One assignment from a gateway."""

    gateway: bytes
    request_id: str
    epoch: int
    num_prompt_tokens: int = 0
    num_uncomputed: int = 0
    """Prompt tokens still to be computed; the gateway's estimate until the request is admitted."""


@dataclass(slots=True)
class _Gateway:
    """A gateway that has sent Hello."""

    name: str
    last_received_s: float
    names: dict[str, str] = field(default_factory=dict)
    """Open request id -> id of its latest assignment."""
    num_received: int = 0
    reported_s: float = float("-inf")
    num_reported_tokens: int = 0
    """Uncomputed tokens in the latest report to this gateway."""


class MemberService:
    """Serves gateways with one supervisor. All methods run on the supervisor's event loop."""

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
        """Assignment id -> assignment."""
        self._num_names = 0
        self._num_uncomputed = 0
        """Prompt tokens still to be computed, over all assignments."""
        self.is_draining = False
        self._unacknowledged: set[bytes] = set()
        """Gateways that have not acknowledged Goodbye."""

    @property
    def num_gateways(self) -> int:
        return len(self._gateways)

    @property
    def num_open(self) -> int:
        """Number of assignments that have not ended."""
        return len(self.assignments)

    @property
    def num_uncomputed_tokens(self) -> int:
        """Prompt tokens still to be computed, over the requests of all gateways."""
        return self._num_uncomputed

    # -- from gateways -------------------------------------------------------------------------------------------------

    def receive(self, identity: bytes, message: ToMember) -> None:
        """Handle a message from a gateway. Raises MessageError if it is invalid."""
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
        """Send Goodbye, the last message, which each gateway acknowledges."""
        self._unacknowledged = set(self._gateways)
        for identity in list(self._unacknowledged):
            self._send(identity, Goodbye())

    @property
    def is_goodbye_acknowledged(self) -> bool:
        """Whether all connected gateways have received all messages."""
        return not self._unacknowledged & self._gateways.keys()

    def drain(self) -> None:
        """Reject new requests, and send gateways the new state."""
        self.is_draining = True
        self.beat()

    def beat(self) -> None:
        """Send a heartbeat to all gateways."""
        for identity in list(self._gateways):
            self._beat_to(identity)

    def forget_silent(self) -> None:
        """Cancel the requests of gateways that have been silent for `MAX_SILENT_S`."""
        now_s = self._clock()
        for identity, gateway in list(self._gateways.items()):
            if now_s - gateway.last_received_s > MAX_SILENT_S:
                log.warning("no heartbeat from gateway %s for %g s", gateway.name, MAX_SILENT_S)
                self.forget(identity)

    def forget(self, identity: bytes) -> None:
        """Remove a gateway that is gone or starts a new session, and cancel its requests."""
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
        """Submit a request in this member's namespace, or refuse it. Raises MessageError if the epoch is stale."""
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
        # A short id, because a worker writes the ids of all running requests into shared memory of fixed size.
        self._num_names += 1
        name = gateway.names[command.request_id] = f"assignment-{self._num_names}"
        taken = self.assignments[name] = _Taken(identity, command.request_id, command.epoch, len(command.prompt))
        self._expect(taken, min(max(num_uncached_tokens, 0), len(command.prompt)))
        self._supervisor.submit(replace(command.received(self._clock()), request_id=name, namespace=own))

    def _checked(self, command: Submit | Restore) -> Namespace:
        """Validate a request and return this member's namespace for it. Raises the error to send as refusal."""
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
        """Run a query in this member's namespace. Raises MessageError if it is not an Explain call."""

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
        """Send the supervisor's events to their gateways, with the gateways' request ids and epochs."""
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
            # Report a changed load at once, because gateways route the next request by it.
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
