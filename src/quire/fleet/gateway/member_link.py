"""A gateway's connection to one member: a new socket for each session.

A socket that has lost its member is closed with all that it had not sent: messages for one incarnation of a member
never reach another. Then the link reconnects: soon if the member was fine, with growing delays if it does not respond
or sent an invalid message.
"""

import asyncio
import logging
from time import monotonic

import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from quire.errors import MessageError
from quire.fleet.protocol.keys import GatewayKeys, secure_gateway, sent_now
from quire.fleet.protocol.link import BEAT_S, BROKE, LinkListener, ReconnectingLink
from quire.fleet.protocol.messages import (
    MAX_MESSAGE_BYTES,
    MAX_STEP_BYTES,
    PROTOCOL,
    GatewayBeat,
    Hello,
    RequestTextAssets,
    TextAssets,
    ToGateway,
    ToMember,
    Welcome,
    bounded_parts,
    decode_to_gateway,
    encode_fleet_message,
)

log = logging.getLogger("quire.fleet")

GREETING_S = 5.0
"""How long a member may take to respond to the first message."""
LAST_READ_MS = 20
LONG_BYTES = 256 << 10
"""Reading so many takes up to 15 ms of processor time."""
LOST = zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED | zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL


class MemberLink(ReconnectingLink):
    """To a quire member."""

    is_openai = False

    def __init__(
        self, context: zmq.asyncio.Context, address: str, keys: GatewayKeys | None, gateway: str, listener: LinkListener
    ) -> None:
        super().__init__(address)
        self._context = context
        self._keys = keys
        self._gateway = gateway
        self._listener = listener
        self._socket: zmq.asyncio.Socket | None = None
        self._awaits_text_assets = False

    def send(self, message: ToMember) -> None:
        """Send a message to a connected member; without one it is dropped, and the listener learns of the loss."""
        if self._socket is None:
            return
        self._awaits_text_assets |= isinstance(message, RequestTextAssets)
        if not sent_now(self._socket.send(encode_fleet_message(message), zmq.DONTWAIT)):
            self._is_over.set()

    def end(self, why: str) -> None:
        """End this session: the member is silent or sent invalid messages."""
        self.problem = why
        self._is_over.set()

    async def _run_session(self) -> bool:
        self._is_over, self._is_trusted, self._awaits_text_assets = asyncio.Event(), True, False
        socket = self._socket = self._context.socket(zmq.DEALER)
        is_fine = False
        try:
            self._prepare(socket)
            is_fine = await self._serve_session(socket)
        except zmq.ZMQError as error:
            self.problem = str(error)
        finally:
            self._socket = None
            socket.close()
            was_open, self.is_open = self.is_open, False
            if was_open:
                self._listener.lost(self, self.problem)
        return is_fine

    def _prepare(self, socket: zmq.asyncio.Socket) -> None:
        secure_gateway(socket, self._keys)
        for option, value in (
            (zmq.LINGER, 0),
            (zmq.SNDHWM, 0),
            (zmq.RCVHWM, 0),
            (zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES),
            (zmq.RECONNECT_IVL, -1),
            (zmq.HEARTBEAT_IVL, 1000),
            (zmq.HEARTBEAT_TIMEOUT, 4000),
            (zmq.IPV6, int("[" in self.address)),
        ):
            socket.setsockopt(option, value)

    async def _serve_session(self, socket: zmq.asyncio.Socket) -> bool:
        """From hello to the end; whether all was well until then."""
        monitor = socket.get_monitor_socket(LOST)
        watching, listening, *others = tasks = [
            asyncio.create_task(self._watch(monitor)),
            asyncio.create_task(self._listen(socket)),
            asyncio.create_task(self._beat()),
            asyncio.create_task(self._is_over.wait()),
        ]
        try:
            socket.connect(self.address)
            self.send(Hello(PROTOCOL, self._gateway))
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            # What a member sent before it died has arrived, and is read to its end.
            while watching.done() and not listening.done() and not any(one.done() for one in others):
                if not await socket.poll(LAST_READ_MS):
                    break
                await asyncio.sleep(0)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            # In this order: the library sends a last event to the monitor, and blocks for ever if that is closed.
            socket.disable_monitor()
            monitor.close()
        error = listening.exception() if not listening.cancelled() else None
        if error is not None:
            self.problem = str(error)
            if not isinstance(error, MessageError | zmq.ZMQError):
                log.error("failed to handle a message from member %s", self.address, exc_info=error)
        return self.is_open and error is None and self._is_trusted

    async def _watch(self, monitor: zmq.asyncio.Socket) -> None:
        await recv_monitor_message(monitor)
        self.problem = BROKE

    async def _listen(self, socket: zmq.asyncio.Socket) -> None:
        message = await self._received(socket)
        if not isinstance(message, Welcome):
            raise MessageError(f"expected a Welcome as first message, got {type(message).__name__}")
        if message.protocol != PROTOCOL:
            raise MessageError(
                f"expected protocol {PROTOCOL}, got {message.protocol}; run one version of quire on gateway and member"
            )
        self._listener.on_message(self, message)
        self.is_open = True
        while True:
            for part in bounded_parts(await self._received(socket)):
                self._listener.on_message(self, part)
                await asyncio.sleep(0)  # other tasks of this loop get a turn

    async def _received(self, socket: zmq.asyncio.Socket) -> ToGateway:
        """The next message. A long one is decoded in a thread."""
        data = await socket.recv()
        if len(data) > MAX_STEP_BYTES and not self._awaits_text_assets:
            raise MessageError(f"expected a message of up to {MAX_STEP_BYTES} bytes, got {len(data)}")
        is_long = len(data) > LONG_BYTES
        message = await asyncio.to_thread(decode_to_gateway, data) if is_long else decode_to_gateway(data)
        self._awaits_text_assets &= not isinstance(message, TextAssets)
        return message

    async def _beat(self) -> None:
        """Heartbeats; a member that does not respond to the first message is dropped."""
        began_s = monotonic()
        while self.is_open or monotonic() - began_s < GREETING_S:
            await asyncio.sleep(BEAT_S)
            self.send(GatewayBeat())
        self.problem = f"no answer within {GREETING_S:g} s"
