"""A gateway's connection to one member: one socket for each time they meet.

A socket that has lost its member is closed with all that it had not sent: what was meant for one life of a member never
reaches another. Then a new one is tried: soon if the member was fine, later and later if nobody answers or if whoever
answered said what cannot be.
"""

import asyncio
import logging
from time import monotonic

import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from quire.errors import MessageError
from quire.fleet.protocol.keys import GatewayKeys, secure_gateway, sent_now
from quire.fleet.protocol.link import BEAT_S, BROKE, LinkListener, MeetingLink
from quire.fleet.protocol.messages import (
    MAX_MESSAGE_BYTES,
    MAX_STEP_BYTES,
    PROTOCOL,
    AskWords,
    GatewayBeat,
    Hello,
    ModelWords,
    ToGateway,
    ToMember,
    Welcome,
    bounded_parts,
    decode_to_gateway,
    encode_fleet_message,
)

log = logging.getLogger("quire.fleet")

GREETING_S = 5.0
"""How long a member may take to answer the first message."""
LAST_READ_MS = 20
LONG_BYTES = 256 << 10
"""Reading so many takes up to 15 ms of processor time."""
LOST = zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED | zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL


class MemberLink(MeetingLink):
    """To a member of quire's own."""

    is_stranger = False

    def __init__(
        self, context: zmq.asyncio.Context, address: str, keys: GatewayKeys | None, gateway: str, listener: LinkListener
    ) -> None:
        super().__init__(address)
        self._context = context
        self._keys = keys
        self._gateway = gateway
        self._listener = listener
        self._socket: zmq.asyncio.Socket | None = None
        self._awaits_words = False

    def send(self, message: ToMember) -> None:
        """Say something to the member that answered; to nobody if it is lost: whoever asked hears of that."""
        if self._socket is None:
            return
        self._awaits_words |= isinstance(message, AskWords)
        if not sent_now(self._socket.send(encode_fleet_message(message), zmq.DONTWAIT)):
            self._is_over.set()

    def end(self, why: str) -> None:
        """This meeting is over: the member is not to be trusted, or silent."""
        self.problem = why
        self._is_over.set()

    async def _meet(self) -> bool:
        """One meeting; whether a member answered, and said nothing that cannot be."""
        self._is_over, self._is_honest, self._awaits_words = asyncio.Event(), True, False
        socket = self._socket = self._context.socket(zmq.DEALER)
        is_fine = False
        try:
            self._prepare(socket)
            is_fine = await self._talk(socket)
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

    async def _talk(self, socket: zmq.asyncio.Socket) -> bool:
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
            # What a member said before it died has arrived, and is read to its end.
            while watching.done() and not listening.done() and not any(one.done() for one in others):
                if not await socket.poll(LAST_READ_MS):
                    break
                await asyncio.sleep(0)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            # In this order: the library says goodbye to the monitor, and waits for ever if nobody is there to hear it.
            socket.disable_monitor()
            monitor.close()
        lie = listening.exception() if not listening.cancelled() else None
        if lie is not None:
            self.problem = str(lie)
            if not isinstance(lie, MessageError | zmq.ZMQError):
                log.error("what member %s said could not be taken in", self.address, exc_info=lie)
        return self.is_open and lie is None and self._is_honest

    async def _watch(self, monitor: zmq.asyncio.Socket) -> None:
        await recv_monitor_message(monitor)
        self.problem = BROKE

    async def _listen(self, socket: zmq.asyncio.Socket) -> None:
        message = await self._received(socket)
        if not isinstance(message, Welcome) or message.protocol != PROTOCOL:
            raise MessageError(
                f"a member begins with its welcome in protocol {PROTOCOL}, {type(message).__name__} came"
            )
        self._listener.hear(self, message)
        self.is_open = True
        while True:
            for part in bounded_parts(await self._received(socket)):
                self._listener.hear(self, part)
                await asyncio.sleep(0)  # everybody else on this loop wants a turn too

    async def _received(self, socket: zmq.asyncio.Socket) -> ToGateway:
        """The next message. A long one is read beside the loop."""
        data = await socket.recv()
        if len(data) > MAX_STEP_BYTES and not self._awaits_words:
            raise MessageError(f"expected a message of up to {MAX_STEP_BYTES} bytes, got {len(data)}")
        is_long = len(data) > LONG_BYTES
        message = await asyncio.to_thread(decode_to_gateway, data) if is_long else decode_to_gateway(data)
        self._awaits_words &= not isinstance(message, ModelWords)
        return message

    async def _beat(self) -> None:
        """Signs of life; a member that does not answer the first message is given up."""
        began_s = monotonic()
        while self.is_open or monotonic() - began_s < GREETING_S:
            await asyncio.sleep(BEAT_S)
            self.send(GatewayBeat())
        self.problem = f"no answer within {GREETING_S:g} s"
