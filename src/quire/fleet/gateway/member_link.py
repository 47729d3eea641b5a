"""A gateway's connection to one quire member, with a new socket for each session.

When the connection is lost, the socket is closed and its unsent messages are dropped, so messages for one incarnation
(process) of a member never reach the next. Then the link reconnects: soon if the session was healthy, with growing
delays if the member did not respond or sent an invalid message.
"""

import asyncio
import logging
from time import monotonic

import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from quire.errors import MessageError
from quire.fleet.protocol.keys import GatewayKeys, secure_gateway, set_options, was_sent
from quire.fleet.protocol.link import CONNECTION_LOST, HEARTBEAT_S, LinkListener, ReconnectingLink
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

WELCOME_TIMEOUT_S = 5.0
"""Time limit for a member's Welcome after the gateway's Hello."""
DRAIN_POLL_MS = 20
THREAD_DECODE_BYTES = 256 << 10
"""Longer messages are decoded in a thread: decoding this many bytes takes up to 15 ms of CPU time."""
LOSS = zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED | zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL


class MemberLink(ReconnectingLink):
    """A link to a quire member."""

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
        """Send a message, or drop it if there is no session. A failed send ends the session."""
        if self._socket is None:
            return
        self._awaits_text_assets |= isinstance(message, RequestTextAssets)
        if not was_sent(self._socket.send(encode_fleet_message(message), zmq.DONTWAIT)):
            self._is_over.set()

    async def _run_session(self) -> bool:
        self._is_over, self._is_trusted, self._awaits_text_assets = asyncio.Event(), True, False
        socket = self._socket = self._context.socket(zmq.DEALER)
        is_healthy = False
        try:
            secure_gateway(socket, self._keys)
            no_limits = (zmq.SNDHWM, 0), (zmq.RCVHWM, 0)
            set_options(socket, self.address, *no_limits, (zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES), (zmq.RECONNECT_IVL, -1))
            is_healthy = await self._serve_session(socket)
        except zmq.ZMQError as error:
            self.problem = str(error)
        finally:
            self._socket = None
            socket.close()
            was_open, self.is_open = self.is_open, False
            if was_open:
                self._listener.on_lost(self, self.problem)
        return is_healthy

    async def _serve_session(self, socket: zmq.asyncio.Socket) -> bool:
        """Run one session from Hello to its end. Return whether the member responded and sent only valid messages."""
        monitor = socket.get_monitor_socket(LOSS)
        monitor_task, listen_task, *other_tasks = tasks = [
            asyncio.create_task(self._watch(monitor)),
            asyncio.create_task(self._listen(socket)),
            asyncio.create_task(self._send_heartbeats()),
            asyncio.create_task(self._is_over.wait()),
        ]
        try:
            socket.connect(self.address)
            self.send(Hello(PROTOCOL, self._gateway))
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            # The connection broke: first read all messages that the member sent before.
            while monitor_task.done() and not listen_task.done() and not any(task.done() for task in other_tasks):
                if not await socket.poll(DRAIN_POLL_MS):
                    break
                await asyncio.sleep(0)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            # In this order, because libzmq sends a last event to the monitor, and blocks forever if it is closed.
            socket.disable_monitor()
            monitor.close()
        error = listen_task.exception() if not listen_task.cancelled() else None
        if error is not None:
            self.problem = str(error)
            if not isinstance(error, MessageError | zmq.ZMQError):
                log.error("failed to handle a message from member %s", self.address, exc_info=error)
        return self.is_open and error is None and self._is_trusted

    async def _watch(self, monitor: zmq.asyncio.Socket) -> None:
        await recv_monitor_message(monitor)
        self.problem = CONNECTION_LOST

    async def _listen(self, socket: zmq.asyncio.Socket) -> None:
        message = await self._receive_message(socket)
        if not isinstance(message, Welcome):
            raise MessageError(f"expected a Welcome as first message, got {type(message).__name__}")
        if message.protocol != PROTOCOL:
            raise MessageError(
                f"expected protocol {PROTOCOL}, got {message.protocol}; run one version of quire on gateway and member"
            )
        self._listener.on_message(self, message)
        self.is_open = True
        while True:
            for part in bounded_parts(await self._receive_message(socket)):
                self._listener.on_message(self, part)
                await asyncio.sleep(0)  # let other tasks of this loop run

    async def _receive_message(self, socket: zmq.asyncio.Socket) -> ToGateway:
        """Return the next message; long ones are decoded in a thread. Raises MessageError if invalid or too long."""
        data = await socket.recv()
        if len(data) > MAX_STEP_BYTES and not self._awaits_text_assets:
            raise MessageError(f"expected a message of up to {MAX_STEP_BYTES} bytes, got {len(data)}")
        is_long = len(data) > THREAD_DECODE_BYTES
        message = await asyncio.to_thread(decode_to_gateway, data) if is_long else decode_to_gateway(data)
        self._awaits_text_assets &= not isinstance(message, TextAssets)
        return message

    async def _send_heartbeats(self) -> None:
        """Send heartbeats. If the member does not respond to Hello in time, return, which ends the session."""
        start_s = monotonic()
        while self.is_open or monotonic() - start_s < WELCOME_TIMEOUT_S:
            await asyncio.sleep(HEARTBEAT_S)
            self.send(GatewayBeat())
        self.problem = f"expected a response to Hello within {WELCOME_TIMEOUT_S:g} s, got none"
