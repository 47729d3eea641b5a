"""A gateway's subscription to one member's KV events, for one session of the link.

    SUB     batches of the member ──────────────┐
    DEALER  responses of the member ────────────┼─► reader ─► index
            requests for missing data ◄─────────┘

Twice a second the subscriber requests the member's position (next batch number), because without a later batch there is
no gap that shows the loss of the latest one.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from time import monotonic, thread_time

import zmq
import zmq.asyncio

from quire.core.work_budget import WorkAccount
from quire.errors import MessageError
from quire.fleet.kv_events.batches import MAX_BATCH_BYTES
from quire.fleet.kv_events.reader import NUMBER_BYTES, EventReader, MissingRange
from quire.fleet.protocol.keys import GatewayKeys, secure_gateway, set_options, was_sent
from quire.fleet.protocol.work import MemberWork
from quire.worker.child.kv_snapshot import POSITION, SNAPSHOT

log = logging.getLogger("quire.fleet")

TICK_S = 0.5
PATIENCE_S = 2.0
"""A request to the member is repeated if no part of its response arrives for this long."""
POSITIONS_UNTIL_LOST = 2
"""A request is also repeated after this many position responses; the first may be to an earlier request."""
MAX_UNREAD = 16
"""Receive high-water mark of ZeroMQ; further messages wait in the kernel's buffers and at the publisher."""


@dataclass(frozen=True, slots=True)
class EventEndpoints:
    """A member's KV-event endpoints and the gateway's keys for them."""

    events: str
    replay: str
    keys: GatewayKeys | None


class KVEventSubscriber:
    """Feeds an `EventReader`. Clients' requests never wait for it: it only improves routing."""

    def __init__(
        self,
        context: zmq.asyncio.Context,
        endpoints: EventEndpoints,
        reader: EventReader,
        work: MemberWork,
        distrust: Callable[[str], None],
    ) -> None:
        self._context = context
        self._events, self._replay, self._keys = endpoints.events, endpoints.replay, endpoints.keys
        self.reader = reader
        self._work = work
        self._account = WorkAccount(reader.member)
        self._distrust = distrust
        """Callback with the reason why this member is no longer trusted."""
        self._request_socket: zmq.asyncio.Socket | None = None
        self._pending: tuple[MissingRange, int, int] | None = None
        """The unfinished request: its kind, the number of member restarts before it, its first batch number."""
        self._last_part_s = 0.0
        """Time of the request or of the latest part of its response."""
        self._num_positions = 0
        """Number of position responses since `_last_part_s`."""
        self._num_batches = self._num_batches_at_request = 0
        """Batches received so far, and those received before the latest position request."""
        self._task: asyncio.Task[None] | None = None
        self.num_malformed = 0
        self.num_snapshots = 0

    def start(self) -> None:
        """Start to receive events."""
        self._task = asyncio.create_task(self._run(), name=f"quire-events {self._events}")

    def stop(self) -> None:
        """Stop updating the index."""
        if self._task is not None:
            self._task.cancel()

    async def close(self) -> None:
        """Stop, and wait until the sockets are closed."""
        self.stop()
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        event_socket = self._context.socket(zmq.SUB)
        request_socket = self._context.socket(zmq.DEALER)
        try:
            for socket, address in ((event_socket, self._events), (request_socket, self._replay)):
                secure_gateway(socket, self._keys)
                limits = (zmq.RCVHWM, MAX_UNREAD), (zmq.MAXMSGSIZE, MAX_BATCH_BYTES)
                set_options(socket, address, *limits, (zmq.IMMEDIATE, 1), (zmq.RECONNECT_IVL_MAX, 2000))
                if address:
                    socket.connect(address)
            event_socket.subscribe(b"")
            self._request_socket = request_socket if self._replay else None
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._receive_batches(event_socket))
                tasks.create_task(self._receive_responses(request_socket))
                tasks.create_task(self._tick())
        except Exception:  # requests continue without KV events
            log.exception("stopped receiving KV events of %s", self._events)
        finally:
            self._request_socket = None
            event_socket.close()
            request_socket.close()

    async def _receive_batches(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            frames = await socket.recv_multipart()
            self._num_batches += 1
            await self._handle(partial(self.reader.receive_batch, frames))
            if self.reader.has_gap:
                self._request_missing()
            await asyncio.sleep(0)  # let other tasks of this loop run

    async def _receive_responses(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            frames = await socket.recv_multipart()
            num_parts, num_positions = self.reader.num_parts, self.reader.num_positions
            await self._handle(partial(self._handle_response, frames))
            if self.reader.num_parts != num_parts:
                self._last_part_s, self._num_positions = monotonic(), 0
            elif self.reader.num_positions != num_positions:
                self._count_position()
            await asyncio.sleep(0)

    async def _handle(self, handle: Callable[[], None]) -> None:
        """Handle one message in parts, so that other tasks of the event loop run between them."""
        await self._run_charged(handle)
        while self.reader.has_work:
            await self._run_charged(self.reader.work)
            self.reader.sweep(monotonic())

    async def _run_charged(self, work: Callable[[], None]) -> None:
        await self._work.wait_for_turn()
        start_s, num_before, problem = thread_time(), self.reader.num_applied, ""
        try:
            work()
        except MessageError as error:
            self._count_malformed(error)
            problem = "" if self.reader.is_trusted else str(error)
        try:
            num_units = 1 + self.reader.num_applied - num_before
            self._work.charge(self._account, "member_events", start_s, num_units)
        except MessageError as error:
            problem = str(error)
        if problem:
            self._distrust(problem)

    def _handle_response(self, frames: Sequence[bytes]) -> None:
        if not self.reader.receive_response(frames):
            if self._num_batches == self._num_batches_at_request:
                self._request_missing()  # no batch arrived since the position request: none will fill the gap
            return
        pending, self._pending = self._pending, None
        if pending is not None and pending[0] is MissingRange.REPLAY:
            self.reader.end_replay(pending[2])
            if self.reader.missing is MissingRange.SNAPSHOT:
                self._request_missing()

    def _count_position(self) -> None:
        """Repeat a request that was lost: members respond in order, so position responses after it show the loss."""
        self._num_positions += 1
        if self._pending is not None and self._num_positions >= POSITIONS_UNTIL_LOST:
            self._pending = None
            self._request_missing()

    async def _tick(self) -> None:
        while True:
            await self._handle(self._request_missing)
            await asyncio.sleep(TICK_S)
            self._request_position()

    def _request_missing(self) -> None:
        """Request the data that the reader needs, unless a recent request is pending."""
        reader = self.reader
        missing, incarnation, first_number = reader.missing, reader.num_incarnations, reader.next_number
        is_pending = self._pending is not None and self._pending[:2] == (missing, incarnation)
        if missing is MissingRange.NOTHING or (is_pending and monotonic() - self._last_part_s < PATIENCE_S):
            return
        if self._request_socket is None:
            reader.end_replay(first_number)  # the member has no replay endpoint
            return
        if self._send(SNAPSHOT if missing is MissingRange.SNAPSHOT else first_number.to_bytes(NUMBER_BYTES, "big")):
            self.num_snapshots += missing is MissingRange.SNAPSHOT
            self._pending, self._last_part_s, self._num_positions = (missing, incarnation, first_number), monotonic(), 0

    def _request_position(self) -> None:
        """Request the position. Other servers do not report it: request a replay, usually empty, of the next batch."""
        if self.reader.has_snapshots:
            self._num_batches_at_request = self._num_batches
            self._send(POSITION)
        elif self._pending is None and self._request_socket is not None:
            first_number = self.reader.next_number
            if self._send(first_number.to_bytes(NUMBER_BYTES, "big")):
                self._pending = (MissingRange.REPLAY, self.reader.num_incarnations, first_number)
                self._last_part_s = monotonic()

    def _send(self, request: bytes) -> bool:
        socket = self._request_socket
        return socket is not None and was_sent(socket.send_multipart([b"", request], zmq.DONTWAIT))

    def _count_malformed(self, error: MessageError) -> None:
        self.num_malformed += 1
        if self.num_malformed & (self.num_malformed - 1) == 0:  # log the 1st, 2nd, 4th, 8th … message
            message = "ignored %d malformed KV-event messages from %s; last: %s"
            log.warning(message, self.num_malformed, self._events, error)
