"""A member's network server: one socket for all gateways, and heartbeats to them.

    gateways ─► ROUTER, with keys ─► service ─► supervisor

Malformed messages are counted and dropped; they cannot stop the server.
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
from quire.fleet.member.service import MemberService
from quire.fleet.member.status import MemberStatus
from quire.fleet.protocol.keys import MemberKeys, check_keys, secure_member, set_options, start_authenticator, was_sent
from quire.fleet.protocol.messages import (
    MAX_MESSAGE_BYTES,
    MemberCard,
    TextAssets,
    ToGateway,
    decode_to_member,
    encode_fleet_message,
)
from quire.worker.parent.supervisor import State, Supervisor

log = logging.getLogger("quire.fleet")

HEARTBEAT_S = 1.0
GOODBYE_S = 5.0
"""Time limit for gateways to acknowledge the Goodbye of a member that exits."""
GOODBYE_POLL_S = 0.01
POLL_S = 0.25
"""Interval between two checks of the supervisor's state."""


class MemberServer:
    """Serves gateways for one supervisor. All methods run on the supervisor's event loop."""

    def __init__(
        self, address: str, keys: MemberKeys | None, text_assets: TextAssets, relay: EventRelay | None = None
    ) -> None:
        """With a `relay`, gateways can subscribe to KV events."""
        check_keys(address, has_keys=keys is not None)
        self._address = address
        self._keys = keys
        self._text_assets = text_assets
        self._relay = relay
        self._context = zmq.asyncio.Context()
        self._socket: zmq.asyncio.Socket | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._authenticator: AsyncioAuthenticator | None = None
        self.service: MemberService | None = None
        """None before `start`."""
        self.address = address
        """The listening address; after `start` with the bound port."""
        self.num_malformed = 0
        self.report_status: Callable[[MemberStatus], None] | None = None
        """Called with this member's status with every heartbeat."""

    def start(self, supervisor: Supervisor, card: Callable[[str], MemberCard]) -> None:
        """Bind and serve for a supervisor that is ready; `card` builds the member card for an incarnation id. Raises
        ConfigError if the address is not free."""
        if self._keys is not None:
            self._authenticator = start_authenticator(self._context, self._keys)
        own_card = card(token_hex(8))
        if self._relay is not None:
            self._relay.start(self._context, self._keys)
            own_card = msgspec.structs.replace(own_card, events=self._relay.events, replay=self._relay.replay)
        self._socket = socket = self._bind_socket()
        self.address = bytes(socket.getsockopt(zmq.LAST_ENDPOINT)).rstrip(b"\0").decode()
        self.service = MemberService(supervisor, own_card, self._text_assets, self._send, monotonic)
        self._tasks = [
            asyncio.create_task(self._listen(socket, self.service), name="quire-member-listen"),
            asyncio.create_task(self._send_heartbeats(supervisor, self.service), name="quire-member-beat"),
        ]
        self._report(supervisor, self.service)

    def on_events(self, events: Sequence[RequestEvent]) -> None:
        """Forward the supervisor's events to their gateways."""
        if self.service is not None:
            self.service.on_events(events)

    def drain(self) -> None:
        """Reject new requests, and send gateways the new state."""
        if self.service is not None:
            self.service.drain()

    async def send_goodbye(self) -> None:
        """Send Goodbye and wait until gateways acknowledge it, because closing a socket does not ensure delivery."""
        deadline_s = monotonic() + GOODBYE_S
        if self.service is not None:
            self.service.send_goodbye()
            while not self.service.is_goodbye_acknowledged and monotonic() < deadline_s:
                await asyncio.sleep(GOODBYE_POLL_S)

    async def close(self) -> None:
        """Close all sockets and connections."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._relay is not None:
            await self._relay.close()
        if self._authenticator is not None:
            self._authenticator.stop()
        self._socket = None
        self._context.destroy(linger=200)

    def _bind_socket(self) -> zmq.asyncio.Socket:
        socket = self._context.socket(zmq.ROUTER)
        secure_member(socket, self._keys)
        set_options(
            socket,
            self._address,
            (zmq.ROUTER_MANDATORY, 1),  # sending to a disconnected gateway fails
            (zmq.SNDHWM, 0),  # bounded by the gateway's requests and its silence timeout
            (zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES),
        )
        try:
            socket.bind(self._address)
        except zmq.ZMQError as error:
            socket.close()
            message = f"expected a free address to listen on such as tcp://127.0.0.1:7000, got {self._address}: {error}"
            raise ConfigError(message) from error
        return socket

    async def _listen(self, socket: zmq.asyncio.Socket, service: MemberService) -> None:
        while True:
            identity, *frames = await socket.recv_multipart()
            try:
                if len(frames) != 1:
                    raise MessageError(f"expected a message of one frame, got {len(frames)}")
                service.receive(identity, decode_to_member(frames[0]))
            except MessageError as error:
                self._count_malformed(error)
            except Exception as error:
                # Continue: without this task the member would send heartbeats but respond to no gateway.
                log.exception("failed to handle a gateway's message")
                self._count_malformed(error)
            await asyncio.sleep(0)  # let other gateways' tasks run

    def _count_malformed(self, error: Exception) -> None:
        self.num_malformed += 1
        if self.num_malformed & (self.num_malformed - 1) == 0:  # log the 1st, 2nd, 4th, 8th … message
            log.warning("dropped malformed message (%d so far): %s", self.num_malformed, error)

    async def _send_heartbeats(self, supervisor: Supervisor, service: MemberService) -> None:
        """Send heartbeats each second, and whenever the supervisor's state changes."""
        last_sent: tuple[State, float] = (supervisor.state, monotonic())
        while True:
            await asyncio.sleep(POLL_S)
            now_s = monotonic()
            if supervisor.state is not last_sent[0] or now_s - last_sent[1] >= HEARTBEAT_S:
                last_sent = (supervisor.state, now_s)
                service.forget_silent()
                service.send_heartbeats()
                self._report(supervisor, service)

    def _report(self, supervisor: Supervisor, service: MemberService) -> None:
        if self.report_status is not None:
            state = State.DRAINING if service.is_draining else supervisor.state
            load = supervisor.load
            num_tokens = service.num_uncomputed_tokens
            self.report_status(MemberStatus(self.address, state.value, load.num_running, load.num_waiting, num_tokens))

    def _send(self, identity: bytes, message: ToGateway) -> bool:
        if self._socket is None:
            return False
        return was_sent(self._socket.send_multipart([identity, encode_fleet_message(message)], zmq.DONTWAIT))
