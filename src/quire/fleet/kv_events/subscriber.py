"""A gateway's ear for what one member holds, for as long as one meeting of the two lasts.

    SUB     what the member publishes ──────────┐
    DEALER  what it answers to questions ───────┼─► reader ─► index
            questions: what the reader wants ◄──┘

Twice a second the member is asked where it stands: a last batch that was lost is followed by none that would show it.
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
from quire.fleet.kv_events.reader import NUMBER_BYTES, EventReader, Want
from quire.fleet.protocol.keys import GatewayKeys, secure_gateway, sent_now
from quire.fleet.protocol.work import MemberWork
from quire.worker.child.kv_snapshot import POSITION, SNAPSHOT

log = logging.getLogger("quire.fleet")

TICK_S = 0.5
PATIENCE_S = 2.0
"""An answer of which nothing has come for so long is asked for again."""
POSITIONS_UNTIL_LOST = 2
"""The same where the member has answered so many questions meanwhile: the first may have been asked before."""
MAX_UNREAD = 16
"""Messages that the library holds for the loop; what is beyond waits in the system's buffers, and at the publisher."""


@dataclass(frozen=True, slots=True)
class EventPlaces:
    """Where a member publishes and answers, and what lets a gateway in."""

    events: str
    replay: str
    keys: GatewayKeys | None


class EventLink:
    """Keeps a reader supplied. Never waited for: without it routing is worse, and answers are the same."""

    def __init__(
        self,
        context: zmq.asyncio.Context,
        places: EventPlaces,
        reader: EventReader,
        work: MemberWork,
        distrust: Callable[[str], None],
    ) -> None:
        self._context = context
        self._events, self._replay, self._keys = places.events, places.replay, places.keys
        self.reader = reader
        self._work = work
        self._account = WorkAccount(reader.member)
        self._distrust = distrust
        """Called with the reason why nothing of this member is believed any more."""
        self._questions: zmq.asyncio.Socket | None = None
        self._asked: tuple[Want, int, int] | None = None
        """What has not been answered to the end, in which of the member's incarnations, and from which number on."""
        self._heard_s = 0.0
        """When a part of the answer came last."""
        self._num_positions = 0
        """Times the member said where it stands since then."""
        self._num_news = self._num_news_asked = 0
        """Batches that came, and how many had when the member was asked where it stands."""
        self._task: asyncio.Task[None] | None = None
        self.num_strange = 0
        """Messages that were none."""
        self.num_snapshots = 0
        """Times one was asked for."""

    def start(self) -> None:
        """Begin to listen."""
        self._task = asyncio.create_task(self._run(), name=f"quire-events {self._events}")

    def stop(self) -> None:
        """From now on nothing is told to the index."""
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
                tasks.create_task(self._hear_news(news))
                tasks.create_task(self._hear_answers(questions))
                tasks.create_task(self._tick())
        except Exception:  # whatever it is, requests go on without
            log.exception("what %s holds is not followed any more", self._events)
        finally:
            self._questions = None
            news.close()
            questions.close()

    async def _hear_news(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            frames = await socket.recv_multipart()
            self._num_news += 1
            await self._take(partial(self.reader.hear_news, frames))
            if self.reader.has_gap:
                self._ask()
            await asyncio.sleep(0)  # everybody else on this loop wants a turn too

    async def _hear_answers(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            frames = await socket.recv_multipart()
            num_parts, num_positions = self.reader.num_parts, self.reader.num_positions
            await self._take(partial(self._take_answer, frames))
            if self.reader.num_parts != num_parts:
                self._heard_s, self._num_positions = monotonic(), 0
            elif self.reader.num_positions != num_positions:
                self._note_position()
            await asyncio.sleep(0)

    async def _take(self, hear: Callable[[], None]) -> None:
        """One message, and what follows from it: a part in each turn of the loop."""
        await self._spend(hear)
        while self.reader.has_work:
            await self._spend(self.reader.work)
            self.reader.sweep(monotonic())

    async def _spend(self, work: Callable[[], None]) -> None:
        await self._work.turn()
        began_s, num_before, problem = thread_time(), self.reader.num_applied, ""
        try:
            work()
        except MessageError as error:
            self._count_strange(error)
            problem = "" if self.reader.is_trusted else str(error)
        try:
            num_units = 1 + self.reader.num_applied - num_before
            self._work.charge(self._account, WorkKind.MEMBER_EVENTS, began_s, num_units)
        except MessageError as error:
            problem = str(error)
        if problem:
            self._distrust(problem)

    def _take_answer(self, frames: Sequence[bytes]) -> None:
        if not self.reader.hear_answer(frames):
            if self._num_news == self._num_news_asked:
                self._ask()  # nothing is on its way that would fill the gap
            return
        asked, self._asked = self._asked, None
        if asked is not None and asked[0] is Want.REPLAY:
            self.reader.replay_ended(asked[2])
            if self.reader.want is Want.SNAPSHOT:
                self._ask()

    def _note_position(self) -> None:
        """A member answers in the order it is asked: what it passed over was lost, with a worker that died perhaps."""
        self._num_positions += 1
        if self._asked is not None and self._num_positions >= POSITIONS_UNTIL_LOST:
            self._asked = None
            self._ask()

    async def _tick(self) -> None:
        while True:
            await self._take(self._ask)
            await asyncio.sleep(TICK_S)
            self._ask_position()

    def _ask(self) -> None:
        """For what the reader wants, unless an answer is on its way."""
        reader = self.reader
        want, incarnation, first = reader.want, reader.num_incarnations, reader.next_number
        is_asked = self._asked is not None and self._asked[:2] == (want, incarnation)
        if want is Want.NOTHING or (is_asked and monotonic() - self._heard_s < PATIENCE_S):
            return
        if self._questions is None:
            reader.replay_ended(first)  # nobody can be asked
            return
        if self._send(SNAPSHOT if want is Want.SNAPSHOT else first.to_bytes(NUMBER_BYTES, "big")):
            self.num_snapshots += want is Want.SNAPSHOT
            self._asked, self._heard_s, self._num_positions = (want, incarnation, first), monotonic(), 0

    def _ask_position(self) -> None:
        """Of one that has no such answer, what comes next is asked for: mostly nothing does."""
        if self.reader.has_snapshots:
            self._num_news_asked = self._num_news
            self._send(POSITION)
        elif self._asked is None and self._questions is not None:
            first = self.reader.next_number
            if self._send(first.to_bytes(NUMBER_BYTES, "big")):
                self._asked, self._heard_s = (Want.REPLAY, self.reader.num_incarnations, first), monotonic()

    def _send(self, question: bytes) -> bool:
        socket = self._questions
        return socket is not None and sent_now(socket.send_multipart([b"", question], zmq.DONTWAIT))

    def _count_strange(self, error: MessageError) -> None:
        self.num_strange += 1
        if self.num_strange & (self.num_strange - 1) == 0:  # the first, the second, the fourth …
            log.warning("%d messages of %s were none, the last: %s", self.num_strange, self._events, error)
