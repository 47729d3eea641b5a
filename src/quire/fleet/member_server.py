"""A member: a supervised worker with an address. Gateways ask it; it answers each with one message for a step.

    gateway ─┐                                   ┌─► worker
    gateway ─┼─► ROUTER ─► assignments ─► supervisor
    gateway ─┘     ▲                        │
                   └── what became of whose requests

Every assignment has a name of its own here, made of the gateway's name for the request and its epoch: the same request
may come again while the one before is still being ended. A gateway that was not heard for a while, or cannot be
reached, wants nothing any more: what it asked for is ended.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from secrets import token_hex
from time import monotonic

import msgspec
import zmq
import zmq.asyncio
from zmq.auth.asyncio import AsyncioAuthenticator

from quire.core.events import Admitted, Explained, Finished, FirstToken, Refused, RequestEvent
from quire.engine.commands import Cancel, ClearCache, Explain, Restore, Submit
from quire.engine.engine import ModelInfo
from quire.engine.loop import received
from quire.errors import ConfigError, DrainingError, MessageError, RequestError
from quire.fleet.event_relay import EventRelay
from quire.fleet.fleet_keys import MemberKeys, check_clear, secure_member, sent_now, start_authenticator
from quire.fleet.fleet_messages import (
    MAX_MESSAGE_BYTES,
    PROTOCOL,
    AskWords,
    Assign,
    GatewayBeat,
    Hello,
    MemberBeat,
    MemberCard,
    MemberStepped,
    ModelWords,
    ToGateway,
    ToMember,
    Welcome,
    decode_to_member,
    encode_fleet_message,
)
from quire.worker.messages import WorkerLoad
from quire.worker.supervisor import State, Supervisor

log = logging.getLogger("quire.fleet")

BEAT_S = 1.0
UNHEARD_S = 10.0
"""A gateway that was silent for so long wants nothing any more."""
LOAD_EVERY_S = 0.1


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
    epochs: dict[str, int] = field(default_factory=dict)
    """Its requests that live here, and which assignment of each."""
    load_told_s: float = 0.0


class MemberServer:
    """Speaks with gateways for one supervisor. Lives on the supervisor's event loop."""

    def __init__(
        self, address: str, keys: MemberKeys | None, words: ModelWords, relay: EventRelay | None = None
    ) -> None:
        """With a relay, gateways are told where they hear what the member holds."""
        check_clear(address, has_keys=keys is not None)
        self._address = address
        self._keys = keys
        self._words = words
        self._relay = relay
        self._context = zmq.asyncio.Context()
        self._socket: zmq.asyncio.Socket | None = None
        self._supervisor: Supervisor | None = None
        self._card: MemberCard | None = None
        self._gateways: dict[bytes, _Gateway] = {}
        self._taken: dict[str, _Taken] = {}
        self._num_uncomputed = 0
        """Prompt tokens of all of them that are still to be computed."""
        self._tasks: list[asyncio.Task[None]] = []
        self._authenticator: AsyncioAuthenticator | None = None
        self._is_draining = False
        self.address = address
        """Where it listens; with the port it got, once it does."""
        self.num_strange = 0
        """Messages that were none."""

    # -- life ----------------------------------------------------------------------------------------------------------

    def start(self, supervisor: Supervisor, card: Callable[[str], MemberCard]) -> None:
        """Listen for a supervisor that is ready; `card` makes what is said of it, given a name for this life."""
        self._supervisor, self._card = supervisor, card(token_hex(8))
        if self._keys is not None:
            self._authenticator = start_authenticator(self._context, self._keys)
        if self._relay is not None:
            self._relay.start(self._context, self._keys)
            self._card = msgspec.structs.replace(self._card, events=self._relay.events, replay=self._relay.replay)
        socket = self._context.socket(zmq.ROUTER)
        secure_member(socket, self._keys)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a gateway that is gone is noticed when it is spoken to
        socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        socket.setsockopt(zmq.SNDHWM, 0)  # bounded by what it asked for, and by how long it may be silent
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        socket.setsockopt(zmq.HEARTBEAT_IVL, 1000)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 4000)
        try:
            socket.bind(self._address)
        except zmq.ZMQError as error:
            socket.close()
            raise ConfigError(
                f"a member listens at a free address such as tcp://127.0.0.1:7000, {self._address} given: {error}"
            ) from error
        self._socket = socket
        self.address = bytes(socket.getsockopt(zmq.LAST_ENDPOINT)).rstrip(b"\0").decode()
        self._tasks = [asyncio.create_task(self._listen(socket)), asyncio.create_task(self._beat())]

    async def close(self) -> None:
        """Say nothing any more."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._relay is not None:
            await self._relay.close()
        if self._authenticator is not None:
            self._authenticator.stop()
        self._context.destroy(linger=200)

    def drain(self) -> None:
        """Take nothing new; gateways are told."""
        self._is_draining = True
        self._beat_all()

    # -- from gateways -------------------------------------------------------------------------------------------------

    async def _listen(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            identity, *frames = await socket.recv_multipart()
            try:
                if len(frames) != 1:
                    raise MessageError(f"a message has one part, {len(frames)} came")
                self._hear(identity, decode_to_member(frames[0]))
            except MessageError as error:
                self.num_strange += 1
                log.warning("a message that is none was dropped: %s", error)

    def _hear(self, identity: bytes, message: ToMember) -> None:
        if isinstance(message, Hello):
            self._greet(identity, message)
            return
        gateway = self._gateways.get(identity)
        if gateway is None:
            raise MessageError("a gateway says hello before it says anything else")
        gateway.heard_s = monotonic()
        supervisor = self._running
        match message:
            case Assign(command, num_uncached_tokens):
                self._assign(identity, gateway, command, num_uncached_tokens)
            case Cancel(request_id, index):
                if request_id in gateway.epochs:
                    supervisor.cancel(_own_name(identity, request_id, gateway.epochs[request_id]), index)
            case Explain(question_id, namespace, prompt):
                name = _own_name(identity, question_id, 0)
                self._taken[name] = _Taken(identity, question_id, 0)
                gateway.epochs[question_id] = 0
                group, adapter = namespace.cache_group, namespace.adapter
                supervisor.explain(name, self._info.namespace(group, adapter), prompt)
            case ClearCache():
                supervisor.clear_cache()
            case AskWords():
                self._send(identity, self._words)
            case GatewayBeat():
                pass

    def _greet(self, identity: bytes, hello: Hello) -> None:
        if hello.protocol != PROTOCOL:
            log.warning("gateway %s speaks protocol %d, this member %d", hello.gateway[:64], hello.protocol, PROTOCOL)
        self._forget(identity)
        self._gateways[identity] = _Gateway(hello.gateway[:64], monotonic())
        if self._card is not None:
            self._send(identity, Welcome(PROTOCOL, self._card))
            self._send(identity, self._state())

    def _assign(self, identity: bytes, gateway: _Gateway, command: Submit | Restore, num_uncached_tokens: int) -> None:
        """One request, in the namespace that this member gives it."""
        before = gateway.epochs.get(command.request_id)
        if before is not None:
            if command.epoch <= before:
                raise MessageError(f"epoch {command.epoch} of a request came after {before}")
            self._running.cancel(_own_name(identity, command.request_id, before))
        wanted, own = command.namespace, self._info.namespace(command.namespace.cache_group, command.namespace.adapter)
        refusal: RequestError | DrainingError | None = None
        if (wanted.format_version, wanted.model) != (own.format_version, own.model):
            refusal = RequestError(f"this member computes {own.model}, {wanted.model} was asked for")
        elif self._is_draining:
            refusal = DrainingError("this member is going down and takes no new requests; ask another one")
        if refusal is not None:
            self._send(identity, MemberStepped((Refused.of(command.request_id, refusal, command.epoch),)))
            return
        name = _own_name(identity, command.request_id, command.epoch)
        taken = self._taken[name] = _Taken(identity, command.request_id, command.epoch, len(command.prompt))
        self._expect(taken, min(max(num_uncached_tokens, 0), len(command.prompt)))
        gateway.epochs[command.request_id] = command.epoch
        request = msgspec.structs.replace(received(command, monotonic()), request_id=name, namespace=own)
        self._running.submit(request)

    # -- from the supervisor -------------------------------------------------------------------------------------------

    def listener(self, events: Sequence[RequestEvent]) -> None:
        """What the supervisor tells: sorted by whose it is, under the names that the gateways know."""
        by_gateway: dict[bytes, list[RequestEvent]] = {}
        for event in events:
            taken = self._taken.get(event.request_id)
            if taken is None:
                continue  # ended for its gateway already
            by_gateway.setdefault(taken.gateway, []).append(
                msgspec.structs.replace(event, request_id=taken.request_id, epoch=taken.epoch)
            )
            if isinstance(event, Admitted):
                self._expect(taken, max(0, taken.num_prompt_tokens - event.num_cached_tokens))
            elif isinstance(event, FirstToken):
                self._expect(taken, 0)
            elif isinstance(event, Finished | Refused | Explained):
                self._end(event.request_id, taken)
        now_s = monotonic()
        for identity, told in by_gateway.items():
            gateway = self._gateways.get(identity)
            is_due = gateway is not None and now_s - gateway.load_told_s >= LOAD_EVERY_S
            if gateway is not None and is_due:
                gateway.load_told_s = now_s
            load = self._load if is_due else None
            self._send(identity, MemberStepped(tuple(told), load, self._num_uncomputed if is_due else None))

    def _expect(self, taken: _Taken, num_uncomputed: int) -> None:
        self._num_uncomputed += num_uncomputed - taken.num_uncomputed
        taken.num_uncomputed = num_uncomputed

    def _end(self, name: str, taken: _Taken) -> None:
        del self._taken[name]
        self._expect(taken, 0)
        gateway = self._gateways.get(taken.gateway)
        if gateway is not None and gateway.epochs.get(taken.request_id) == taken.epoch:
            del gateway.epochs[taken.request_id]

    # -- signs of life -------------------------------------------------------------------------------------------------

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(BEAT_S)
            now_s = monotonic()
            for identity in [one for one, it in self._gateways.items() if now_s - it.heard_s > UNHEARD_S]:
                log.warning("gateway %s was not heard for %g s", self._gateways[identity].name, UNHEARD_S)
                self._forget(identity)
            self._beat_all()

    def _beat_all(self) -> None:
        for identity in list(self._gateways):
            self._send(identity, self._state())

    def _state(self) -> MemberBeat:
        state = State.DRAINING if self._is_draining else self._running.state
        return MemberBeat(state.value, self._load, self._num_uncomputed)

    def _forget(self, identity: bytes) -> None:
        """A gateway that is gone, or begins anew: what it asked for is ended."""
        gateway = self._gateways.pop(identity, None)
        if gateway is None:
            return
        for request_id, epoch in gateway.epochs.items():
            name = _own_name(identity, request_id, epoch)
            taken = self._taken.pop(name, None)
            if taken is not None:
                self._expect(taken, 0)
                self._running.cancel(name)

    def _send(self, identity: bytes, message: ToGateway) -> None:
        if self._socket is None:
            return
        if not sent_now(self._socket.send_multipart([identity, encode_fleet_message(message)], zmq.DONTWAIT)):
            self._forget(identity)  # nobody is there

    @property
    def _running(self) -> Supervisor:
        if self._supervisor is None:
            raise ConfigError("a member must be started before it is asked")
        return self._supervisor

    @property
    def _info(self) -> ModelInfo:
        if self._card is None:
            raise ConfigError("a member must be started before it is asked")
        return self._card.info

    @property
    def _load(self) -> WorkerLoad:
        return self._running.load


def _own_name(identity: bytes, request_id: str, epoch: int) -> str:
    return f"{request_id}.{epoch}.{identity.hex()}"
