"""A member's address: one socket that gateways ask, and signs of life to all of them.

    gateways ─► ROUTER, with keys ─► desk ─► supervisor

Whatever comes that is no message is counted and dropped; what is no message can stop nothing here.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from secrets import token_hex
from time import monotonic

import msgspec
import zmq
import zmq.asyncio
from zmq.auth.asyncio import AsyncioAuthenticator

from quire.core.events import RequestEvent
from quire.errors import ConfigError, MessageError
from quire.fleet.kv_events.relay import EventRelay
from quire.fleet.member.service import MemberDesk
from quire.fleet.member.status import MemberStatus
from quire.fleet.protocol.keys import MemberKeys, check_clear, secure_member, sent_now, start_authenticator
from quire.fleet.protocol.messages import (
    MAX_MESSAGE_BYTES,
    MemberCard,
    ModelWords,
    ToGateway,
    decode_to_member,
    encode_fleet_message,
)
from quire.worker.parent.supervisor import State, Supervisor

log = logging.getLogger("quire.fleet")

BEAT_S = 1.0
FAREWELL_S = 5.0
"""How long gateways may take to hear the last words of a member that ends."""
FAREWELL_LOOK_S = 0.01
LOOK_S = 0.25
"""Between two looks at whether the supervisor's state is another one."""


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
        self._tasks: list[asyncio.Task[None]] = []
        self._authenticator: AsyncioAuthenticator | None = None
        self.desk: MemberDesk | None = None
        """Once it listens."""
        self.address = address
        """Where it listens; with the port it got, once it does."""
        self.num_strange = 0
        """Messages that were none."""
        self.tell: Callable[[MemberStatus], None] | None = None
        """Hears how this member is, as often as gateways do."""

    def start(self, supervisor: Supervisor, card: Callable[[str], MemberCard]) -> None:
        """Listen for a supervisor that is ready; `card` makes what is said of it, given a name for this life."""
        if self._keys is not None:
            self._authenticator = start_authenticator(self._context, self._keys)
        told = card(token_hex(8))
        if self._relay is not None:
            self._relay.start(self._context, self._keys)
            told = msgspec.structs.replace(told, events=self._relay.events, replay=self._relay.replay)
        self._socket = socket = self._bound()
        self.address = bytes(socket.getsockopt(zmq.LAST_ENDPOINT)).rstrip(b"\0").decode()
        self.desk = MemberDesk(supervisor, told, self._words, self._send, monotonic)
        self._tasks = [
            asyncio.create_task(self._listen(socket, self.desk), name="quire-member-listen"),
            asyncio.create_task(self._beat(supervisor, self.desk), name="quire-member-beat"),
        ]
        self._tell(supervisor, self.desk)

    def listener(self, events: Sequence[RequestEvent]) -> None:
        """What the supervisor tells."""
        if self.desk is not None:
            self.desk.listener(events)

    def drain(self) -> None:
        """Take nothing new; gateways are told."""
        if self.desk is not None:
            self.desk.drain()

    async def farewell(self) -> None:
        """Wait until gateways have heard all that was said. A socket that is closed gives no such promise."""
        until_s = monotonic() + FAREWELL_S
        if self.desk is not None:
            self.desk.farewell()
            while not self.desk.is_farewell_heard and monotonic() < until_s:
                await asyncio.sleep(FAREWELL_LOOK_S)

    async def close(self) -> None:
        """Say nothing any more."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._relay is not None:
            await self._relay.close()
        if self._authenticator is not None:
            self._authenticator.stop()
        self._socket = None
        self._context.destroy(linger=200)

    def _bound(self) -> zmq.asyncio.Socket:
        socket = self._context.socket(zmq.ROUTER)
        secure_member(socket, self._keys)
        for option, value in (
            (zmq.ROUTER_MANDATORY, 1),  # a gateway that is gone is noticed when it is spoken to
            (zmq.SNDHWM, 0),  # bounded by what it asked for, and by how long it may be silent
            (zmq.LINGER, 0),
            (zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES),
            (zmq.HEARTBEAT_IVL, 1000),
            (zmq.HEARTBEAT_TIMEOUT, 4000),
            (zmq.IPV6, int("[" in self._address)),
        ):
            socket.setsockopt(option, value)
        try:
            socket.bind(self._address)
        except zmq.ZMQError as error:
            socket.close()
            raise ConfigError(
                f"a member listens at a free address such as tcp://127.0.0.1:7000, {self._address} given: {error}"
            ) from error
        return socket

    async def _listen(self, socket: zmq.asyncio.Socket, desk: MemberDesk) -> None:
        while True:
            identity, *frames = await socket.recv_multipart()
            try:
                if len(frames) != 1:
                    raise MessageError(f"a message has one part, {len(frames)} came")
                desk.hear(identity, decode_to_member(frames[0]))
            except MessageError as error:
                self._count_strange(error)
            except Exception as error:
                # A member that does not listen any more looks alive to all gateways, and answers none.
                log.exception("a gateway's message could not be obeyed")
                self._count_strange(error)
            await asyncio.sleep(0)  # whoever says much does not keep the others waiting

    def _count_strange(self, error: Exception) -> None:
        self.num_strange += 1
        if self.num_strange & (self.num_strange - 1) == 0:  # the first, the second, the fourth: a log has an end
            log.warning("a message that is none was dropped, %d so far: %s", self.num_strange, error)

    async def _beat(self, supervisor: Supervisor, desk: MemberDesk) -> None:
        """Each second, and whenever the supervisor's state is another one."""
        told: tuple[State, float] = (supervisor.state, monotonic())
        while True:
            await asyncio.sleep(LOOK_S)
            now_s = monotonic()
            if supervisor.state is not told[0] or now_s - told[1] >= BEAT_S:
                told = (supervisor.state, now_s)
                desk.forget_silent()
                desk.beat()
                self._tell(supervisor, desk)

    def _tell(self, supervisor: Supervisor, desk: MemberDesk) -> None:
        if self.tell is not None:
            state = State.DRAINING if desk.is_draining else supervisor.state
            load = supervisor.load
            self.tell(
                MemberStatus(self.address, state.value, load.num_running, load.num_waiting, desk.num_uncomputed_tokens)
            )

    def _send(self, identity: bytes, message: ToGateway) -> bool:
        if self._socket is None:
            return False
        return sent_now(self._socket.send_multipart([identity, encode_fleet_message(message)], zmq.DONTWAIT))
