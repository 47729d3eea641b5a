"""A gateway's subscription to one member's KV events, for one session of the link.

    SUB     batches of the member ──────────────┐
    DEALER  responses of the member ────────────┼─► reader ─► index
            requests for missing data ◄─────────┘

Twice a second the subscriber requests the member's position (next batch number), because a lost last batch shows up in
no later batch.
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
from quire.fleet.protocol.keys import GatewayKeys, secure_gateway, sent_now, set_options
from quire.fleet.protocol.work import MemberWork
from quire.worker.child.kv_snapshot import POSITION, SNAPSHOT

log = logging.getLogger("quire.fleet")

TICK_S = 0.5
PATIENCE_S = 2.0
"""A request is repeated if no part of its response arrives for this long."""
POSITIONS_UNTIL_LOST = 2
"""A request is also repeated after this many position responses; the first may be to a request sent before."""
MAX_UNREAD = 16
"""Receive high-water mark of ZeroMQ; further messages wait in the kernel's buffers and at the publisher."""


@dataclass(frozen=True, slots=True)
class EventEndpoints:
    """A member's KV-event endpoints and the gateway's keys for them."""

    events: str
    replay: str
    keys: GatewayKeys | None


class KVEventSubscriber:
    """Feeds an `EventReader`. Requests never wait for it: without it routing is worse, but responses are the same."""

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
        self._questions: zmq.asyncio.Socket | None = None
        self._pending: tuple[MissingRange, int, int] | None = None
        """The unfinished request: kind, number of member restarts seen, first batch number."""
        self._last_part_s = 0.0
        """Time of the request or of the latest part of its response."""
        self._num_positions = 0
        """Position responses since `_last_part_s`."""
        self._num_news = self._num_news_at_request = 0
        """Batches received in total, and until the latest position request."""
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
        news = self._context.socket(zmq.SUB)
        questions = self._context.socket(zmq.DEALER)
        try:
            for socket, address in ((news, self._events), (questions, self._replay)):
                secure_gateway(socket, self._keys)
                bounds = (zmq.RCVHWM, MAX_UNREAD), (zmq.MAXMSGSIZE, MAX_BATCH_BYTES)
                set_options(socket, address, *bounds, (zmq.IMMEDIATE, 1), (zmq.RECONNECT_IVL_MAX, 2000))
                if address:
                    socket.connect(address)
            news.subscribe(b"")
            self._questions = questions if self._replay else None
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._receive_news(news))
                tasks.create_task(self._receive_responses(questions))
                tasks.create_task(self._tick())
        except Exception:  # requests continue without KV events
            log.exception("stopped following KV events of %s", self._events)
        finally:
            self._questions = None
            news.close()
            questions.close()

    async def _receive_news(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            frames = await socket.recv_multipart()
            self._num_news += 1
            await self._take(partial(self.reader.receive_batch, frames))
            if self.reader.has_gap:
                self._request_missing()
            await asyncio.sleep(0)  # let other tasks of this loop run

    async def _receive_responses(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            frames = await socket.recv_multipart()
            num_parts, num_positions = self.reader.num_parts, self.reader.num_positions
            await self._take(partial(self._take_answer, frames))
            if self.reader.num_parts != num_parts:
                self._last_part_s, self._num_positions = monotonic(), 0
            elif self.reader.num_positions != num_positions:
                self._note_position()
            await asyncio.sleep(0)

    async def _take(self, handle: Callable[[], None]) -> None:
        """Handle one message in parts, so that other tasks of the event loop run between them."""
        await self._spend(handle)
        while self.reader.has_work:
            await self._spend(self.reader.work)
            self.reader.sweep(monotonic())

    async def _spend(self, work: Callable[[], None]) -> None:
        await self._work.turn()
        began_s, num_before, problem = thread_time(), self.reader.num_applied, ""
        try:
            work()
        except MessageError as error:
            self._count_malformed(error)
            problem = "" if self.reader.is_trusted else str(error)
        try:
            num_units = 1 + self.reader.num_applied - num_before
            self._work.charge(self._account, "member_events", began_s, num_units)
        except MessageError as error:
            problem = str(error)
        if problem:
            self._distrust(problem)

    def _take_answer(self, frames: Sequence[bytes]) -> None:
        if not self.reader.receive_response(frames):
            if self._num_news == self._num_news_at_request:
                self._request_missing()  # no batch arrived since the position request: none will fill the gap
            return
        pending, self._pending = self._pending, None
        if pending is not None and pending[0] is MissingRange.REPLAY:
            self.reader.replay_ended(pending[2])
            if self.reader.want is MissingRange.SNAPSHOT:
                self._request_missing()

    def _note_position(self) -> None:
        """Repeat a request that was lost: members respond in order, so position responses after it show the loss."""
        self._num_positions += 1
        if self._pending is not None and self._num_positions >= POSITIONS_UNTIL_LOST:
            self._pending = None
            self._request_missing()

    async def _tick(self) -> None:
        while True:
            await self._take(self._request_missing)
            await asyncio.sleep(TICK_S)
            self._request_position()

    def _request_missing(self) -> None:
        """Request the data that the reader needs, unless a recent request is pending."""
        reader = self.reader
        want, incarnation, first = reader.want, reader.num_incarnations, reader.next_number
        is_pending = self._pending is not None and self._pending[:2] == (want, incarnation)
        if want is MissingRange.NOTHING or (is_pending and monotonic() - self._last_part_s < PATIENCE_S):
            return
        if self._questions is None:
            reader.replay_ended(first)  # the member has no replay endpoint
            return
        if self._send(SNAPSHOT if want is MissingRange.SNAPSHOT else first.to_bytes(NUMBER_BYTES, "big")):
            self.num_snapshots += want is MissingRange.SNAPSHOT
            self._pending, self._last_part_s, self._num_positions = (want, incarnation, first), monotonic(), 0

    def _request_position(self) -> None:
        """Request the position. Other servers do not report it: request a replay, usually empty, of the next batch."""
        if self.reader.has_snapshots:
            self._num_news_at_request = self._num_news
            self._send(POSITION)
        elif self._pending is None and self._questions is not None:
            first = self.reader.next_number
            if self._send(first.to_bytes(NUMBER_BYTES, "big")):
                self._pending = (MissingRange.REPLAY, self.reader.num_incarnations, first)
                self._last_part_s = monotonic()

    def _send(self, question: bytes) -> bool:
        socket = self._questions
        return socket is not None and sent_now(socket.send_multipart([b"", question], zmq.DONTWAIT))

    def _count_malformed(self, error: MessageError) -> None:
        self.num_malformed += 1
        if self.num_malformed & (self.num_malformed - 1) == 0:  # log the 1st, 2nd, 4th, 8th … message
            message = "ignored %d malformed KV-event messages from %s; last: %s"
            log.warning(message, self.num_malformed, self._events, error)
