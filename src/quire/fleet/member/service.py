"""A member's service for gateways: runs their assignments and returns events to each gateway. No sockets.

    gateway ─┐                ┌─► supervisor ─► worker
    gateway ─┼─► the service ─┤
    gateway ─┘       ▲        └── events of requests
                     └────────────────────┘

The member gives every assignment a short id of its own, because two gateways may use the same request id, and a
gateway may assign a request again while its earlier assignment is still being cancelled. The requests of a gateway that
is silent for `MAX_SILENT_S`, or unreachable, are cancelled.
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
class _Assignment:
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
    local_ids: dict[str, str] = field(default_factory=dict)
    """Open request id -> the short id (at this member) of its latest assignment."""
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
        self.assignments: dict[str, _Assignment] = {}
        """Short id -> assignment."""
        self._num_assignments = 0
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
                if request_id in gateway.local_ids:
                    self._supervisor.cancel(gateway.local_ids[request_id], index)
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
        self.send_heartbeats()

    def send_heartbeats(self) -> None:
        """Send a heartbeat to all gateways."""
        for identity in list(self._gateways):
            self._send_heartbeat(identity)

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
        for local_id in [local_id for local_id, entry in self.assignments.items() if entry.gateway == identity]:
            self._set_uncomputed(self.assignments.pop(local_id), 0)
            self._supervisor.cancel(local_id)

    def _welcome(self, identity: bytes, hello: Hello) -> None:
        name = hello.gateway[:MAX_NAME_CHARS]
        if hello.protocol != PROTOCOL:
            log.warning("gateway %s uses protocol %d, this member %d", name, hello.protocol, PROTOCOL)
        self.forget(identity)
        self._gateways[identity] = _Gateway(name, self._clock())
        self._send(identity, Welcome(PROTOCOL, self._card))
        self._send_heartbeat(identity)

    def _assign(self, identity: bytes, gateway: _Gateway, command: Submit | Restore, num_uncached_tokens: int) -> None:
        """Submit a request in this member's namespace, or refuse it. Raises MessageError if the epoch is stale."""
        previous = self.assignments.get(gateway.local_ids.get(command.request_id, ""))
        if previous is not None and command.epoch <= previous.epoch:
            raise MessageError(f"expected an epoch after {previous.epoch}, got {command.epoch}", code="stale_epoch")
        if previous is not None:
            self._supervisor.cancel(gateway.local_ids[command.request_id])
        try:
            namespace = self._validated_namespace(command)
        except QuireError as error:
            self._send(identity, MemberStepped((Refused.of(command.request_id, error, command.epoch),)))
            return
        # A short id, because a worker writes the ids of all running requests into shared memory of fixed size.
        self._num_assignments += 1
        local_id = gateway.local_ids[command.request_id] = f"assignment-{self._num_assignments}"
        new = self.assignments[local_id] = _Assignment(identity, command.request_id, command.epoch, len(command.prompt))
        self._set_uncomputed(new, min(max(num_uncached_tokens, 0), len(command.prompt)))
        self._supervisor.submit(replace(command.to_request(self._clock()), request_id=local_id, namespace=namespace))

    def _validated_namespace(self, command: Submit | Restore) -> Namespace:
        """Validate a request and return this member's namespace for it. Raises the error to send as refusal."""
        requested, info = command.namespace, self._card.info
        namespace = info.namespace(requested.cache_group, requested.adapter)
        if len(command.request_id) > MAX_ID_CHARS:
            num_chars = len(command.request_id)
            raise RequestError(f"expected a request id of up to {MAX_ID_CHARS} characters, got {num_chars}")
        if (requested.format_version, requested.model) != (namespace.format_version, namespace.model):
            raise RequestError(f"expected a request for {namespace.model}, got {requested.model[:MAX_ID_CHARS]}")
        check_assignment(command, info)
        if self.is_draining:
            raise DrainingError("this member is shutting down and takes no new requests; use another one")
        return namespace

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
        namespace = info.namespace(op.namespace.cache_group, op.namespace.adapter)
        self._supervisor.call(replace(op, namespace=namespace), on_reply)

    # -- from the supervisor -------------------------------------------------------------------------------------------

    def on_events(self, events: Sequence[RequestEvent]) -> None:
        """Send events of the supervisor to their gateways, with the gateways' request ids and epochs."""
        by_gateway: dict[bytes, list[RequestEvent]] = {}
        for event in events:
            assignment = self.assignments.get(event.request_id)
            if assignment is None:
                continue  # its gateway is gone
            renamed = replace(event, request_id=assignment.request_id, epoch=assignment.epoch)
            by_gateway.setdefault(assignment.gateway, []).append(renamed)
            if isinstance(event, Admitted):
                self._set_uncomputed(assignment, max(0, assignment.num_prompt_tokens - event.num_cached_tokens))
            elif isinstance(event, Replayed):
                self._set_uncomputed(assignment, assignment.num_prompt_tokens)
            elif isinstance(event, FirstToken):
                self._set_uncomputed(assignment, 0)
            elif isinstance(event, Finished | Refused):
                self._end(event.request_id, assignment)
        now_s = self._clock()
        for identity, gateway_events in by_gateway.items():
            gateway = self._gateways.get(identity)
            if gateway is None:
                continue
            # Report a changed load at once, because gateways route the next request by it.
            is_due = self._num_uncomputed != gateway.num_reported_tokens or now_s - gateway.reported_s >= REPORT_EVERY_S
            self._send(identity, MemberStepped(tuple(gateway_events), self._report(gateway, now_s) if is_due else None))

    def _set_uncomputed(self, assignment: _Assignment, num_uncomputed: int) -> None:
        self._num_uncomputed += num_uncomputed - assignment.num_uncomputed
        assignment.num_uncomputed = num_uncomputed

    def _end(self, local_id: str, assignment: _Assignment) -> None:
        del self.assignments[local_id]
        self._set_uncomputed(assignment, 0)
        gateway = self._gateways.get(assignment.gateway)
        if gateway is not None and gateway.local_ids.get(assignment.request_id) == local_id:
            del gateway.local_ids[assignment.request_id]

    # -- to gateways ---------------------------------------------------------------------------------------------------

    def _send_heartbeat(self, identity: bytes) -> None:
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
