"""A gateway's subscription to one member's KV events, for one session of the link.

    SUB     batches of the member ──────────────┐
    DEALER  its responses ──────────────────────┼─► reader ─► index
            requests: what the reader lacks ◄───┘

Twice a second the member's position is requested: if the last batch was lost, no later one would show it.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from time import monotonic, thread_time

import zmq
import zmq.asyncio

from quire.core.work_budget import WorkAccount, WorkKind
from quire.errors import MessageError
from quire.fleet.kv_events.batches import MAX_BATCH_BYTES
from quire.fleet.kv_events.reader import NUMBER_BYTES, EventReader, MissingRange
from quire.fleet.protocol.keys import GatewayKeys, secure_gateway, sent_now
from quire.fleet.protocol.work import MemberWork
from quire.worker.child.kv_snapshot import POSITION, SNAPSHOT

log = logging.getLogger("quire.fleet")

TICK_S = 0.5
PATIENCE_S = 2.0
"""A request without any response for so long is repeated."""
POSITIONS_UNTIL_LOST = 2
"""The same after so many position responses: the first may be of an earlier request."""
MAX_UNREAD = 16
"""Messages that the library buffers for the loop; the rest waits in the system's buffers, and at the publisher."""


@dataclass(frozen=True, slots=True)
class EventEndpoints:
    """A member's endpoints, and the keys for them."""

    events: str
    replay: str
    keys: GatewayKeys | None


class KVEventSubscriber:
    """Keeps a reader supplied. Nothing waits for it: without it routing is worse, and responses are the same."""

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
        """Called with the reason why this member is no longer trusted."""
        self._questions: zmq.asyncio.Socket | None = None
        self._pending: tuple[MissingRange, int, int] | None = None
        """The unfinished request: what, in which incarnation of the member, and from which number on."""
        self._last_part_s = 0.0
        """When its latest part came."""
        self._num_positions = 0
        """Position responses since then."""
        self._num_news = self._num_news_at_request = 0
        """Batches that came, and how many had when the position was requested."""
        self._task: asyncio.Task[None] | None = None
        self.num_malformed = 0
        self.num_snapshots = 0
        """Snapshots that were requested."""

    def start(self) -> None:
        """Begin to receive."""
        self._task = asyncio.create_task(self._run(), name=f"quire-events {self._events}")

    def stop(self) -> None:
        """Stop updating the index."""
        if self._task is not None:
            self._task.cancel()

    async def close(self) -> None:
        """The same, and wait until its sockets are closed."""
        self.stop()
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        news = self._context.socket(zmq.SUB)
        questions = self._context.socket(zmq.DEALER)
        try:
            for socket, address in ((news, self._events), (questions, self._replay)):
                secure_gateway(socket, self._keys)
                for option, value in (
                    (zmq.LINGER, 0),
                    (zmq.IMMEDIATE, 1),
                    (zmq.RCVHWM, MAX_UNREAD),
                    (zmq.MAXMSGSIZE, MAX_BATCH_BYTES),
                    (zmq.RECONNECT_IVL_MAX, 2000),
                    (zmq.HEARTBEAT_IVL, 1000),
                    (zmq.HEARTBEAT_TIMEOUT, 4000),
                    (zmq.IPV6, int("[" in address)),
                ):
                    socket.setsockopt(option, value)
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
            await asyncio.sleep(0)  # other tasks of this loop get a turn

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
        """Handle one message, a part in each turn of the loop."""
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
            self._work.charge(self._account, WorkKind.MEMBER_EVENTS, began_s, num_units)
        except MessageError as error:
            problem = str(error)
        if problem:
            self._distrust(problem)

    def _take_answer(self, frames: Sequence[bytes]) -> None:
        if not self.reader.receive_response(frames):
            if self._num_news == self._num_news_at_request:
                self._request_missing()  # no batch is on its way that would fill the gap
            return
        pending, self._pending = self._pending, None
        if pending is not None and pending[0] is MissingRange.REPLAY:
            self.reader.replay_ended(pending[2])
            if self.reader.want is MissingRange.SNAPSHOT:
                self._request_missing()

    def _note_position(self) -> None:
        """A member responds in order: a request that it passed over was lost, perhaps with a worker that died."""
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
        """Request what the reader lacks, unless a response is on its way."""
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
        """Other servers have no such response: the next batch is requested, which mostly is not there."""
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
        if self.num_malformed & (self.num_malformed - 1) == 0:  # the first, the second, the fourth …
            message = "ignored %d malformed KV-event messages from %s; last: %s"
            log.warning(message, self.num_malformed, self._events, error)
