"""A gateway's connection to a member that is not quire: to the fleet it speaks as any member does.

    fleet ── Assign, Cancel ──► this ── POST /v1/completions, one connection for each answer ──► server
    fleet ◄── Welcome, MemberStepped, MemberBeat ◄── this ◄── streams · GET /metrics each second ◄──┘

A meeting begins when the server lists its models and cuts a text into our tokens, and ends when it cannot be reached,
says what cannot be, or is told to. Then its requests move, and it is tried again. A stream that breaks while the server
is well ends its own request alone.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from secrets import token_hex
from time import thread_time
from typing import TypeVar

from quire.core.events import Refused, RequestEvent
from quire.core.request import Continuation, FinishReason
from quire.core.work_budget import WorkAccount, WorkKind
from quire.engine.commands import Cancel, ClearCache, Explain, Restore, Submit
from quire.errors import DrainingError, MessageError, QuireError, RequestError
from quire.fleet.openai.address import StrangerAddress, read_key
from quire.fleet.openai.assignment import StrangerFlight
from quire.fleet.openai.http_exchange import HttpExchange, HttpServer, ask, opened_exchange
from quire.fleet.openai.metrics import StrangerFigures, read_figures
from quire.fleet.openai.model_card import PROBE, ModelClaim, card_of, check_probe, read_model, report_of
from quire.fleet.openai.requests import completion_body, lacking
from quire.fleet.openai.stream import StrangerFailure, StrangerStream, error_of, refusal_of
from quire.fleet.protocol.link import BEAT_S, LinkListener, MeetingLink
from quire.fleet.protocol.messages import (
    PROTOCOL,
    Assign,
    MemberBeat,
    MemberCard,
    MemberReport,
    MemberStepped,
    ToGateway,
    ToMember,
    Welcome,
)
from quire.fleet.protocol.work import MemberWork

log = logging.getLogger("quire.fleet")

READY, DRAINING = "ready", "draining"
"""What the fleet is told of a server: one that shuts down in order gets nothing new, and ends what it has."""
T = TypeVar("T")
LOOK_TIMEOUT_S = 10.0
"""For `/metrics`. Whoever is silent for longer than the fleet waits is left before."""
PIECE_BYTES, PIECE_TOKENS = 4096, 64
"""Of a stream, before others on the loop may have a turn."""
NO_CLAIM = (
    "the model's tokens are not known yet: a member that is not quire sends no tokenizer, so a member of quire's own "
    "must be ready first, or the gateway be given --tokenizer MODEL"
)


class _RefusedError(Exception):
    """The server did not take a request, or broke it off by its own word."""

    def __init__(self, failure: StrangerFailure, retry_after: str = "") -> None:
        super().__init__(failure.message)
        self.failure = failure
        self.retry_after = retry_after


@dataclass(slots=True)
class _Open:
    """An assignment on its way."""

    flight: StrangerFlight
    all_agreed: asyncio.Event = field(default_factory=asyncio.Event)
    task: "asyncio.Task[None] | None" = None
    answers: "dict[int, asyncio.Task[None]]" = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Meeting:
    """A server that has said who it is."""

    server: HttpServer
    card: MemberCard
    has_metrics: bool


class StrangerLink(MeetingLink):
    """To a server of another make."""

    is_stranger = True

    def __init__(
        self,
        address: StrangerAddress,
        claim: Callable[[], ModelClaim | None],
        listener: LinkListener,
        work: MemberWork,
    ) -> None:
        super().__init__(address.line)
        self._where = address
        self._claim = claim
        self._listener = listener
        self._work = work
        self._account = WorkAccount(self.address)
        """What all its figures have cost; each answer has an account of its own."""
        self._meeting: _Meeting | None = None
        self._figures = StrangerFigures()
        self._flights: dict[str, _Open] = {}
        self._num_heard = 0
        self._state = READY
        self._has_heard = False
        """Something came of the server since the last beat."""
        self._others: set[asyncio.Task[None]] = set()

    # -- as every link -------------------------------------------------------------------------------------------------

    def end(self, why: str) -> None:
        """This meeting is over: the server is not to be trusted, or silent."""
        if not self._is_over.is_set():
            self.problem = why
        self._is_over.set()

    def send(self, message: ToMember) -> None:
        """Have the server do what a member would; what becomes of it is told later, never from within."""
        if not self.is_open or self._is_over.is_set():
            return
        match message:
            case Assign(command, num_uncached_tokens):
                self._num_heard += 1
                self._assign(command, num_uncached_tokens)
            case Cancel(request_id, index):
                self._cancel(request_id, index)
            case Explain(question_id):
                error = RequestError("a member that is not quire cannot say why a prompt is not cached")
                asyncio.get_running_loop().call_soon(self._tell, [Refused.of(question_id, error)])
            case ClearCache():
                task = asyncio.create_task(self._clear_cache())
                self._others.add(task)
                task.add_done_callback(self._others.discard)
            case _:
                pass  # greetings and signs of life: HTTP needs none

    # -- meetings ------------------------------------------------------------------------------------------------------

    async def _meet(self) -> bool:
        """One meeting; whether the server answered, and said nothing that cannot be."""
        claim = self._claim()
        if claim is None:
            self.problem = NO_CLAIM
            return True
        self._is_over = asyncio.Event()
        self._is_honest, self._num_heard, is_fine = True, 0, False
        self._account = WorkAccount(self.address)
        try:
            meeting = self._meeting = await self._greet(claim)
            await self._talk(meeting)
            is_fine = self._is_honest
        except (OSError, QuireError) as error:
            self.problem = str(error) or type(error).__name__
        except Exception as error:  # whatever it is, it is tried again
            self.problem = f"{type(error).__name__} here"
            log.exception("what member %s said could not be taken in", self.address)
        finally:
            self._meeting = None
            was_open, self.is_open = self.is_open, False
            if was_open:
                self._listener.lost(self, self.problem)
            await self._leave_all()
        return is_fine

    async def _leave_all(self) -> None:
        flights, self._flights = self._flights, {}
        tasks = [*(one.task for one in flights.values() if one.task is not None), *self._others]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _greet(self, claim: ModelClaim) -> _Meeting:
        """Who is there? Raises OSError or QuireError if it cannot be a member."""
        where = self._where
        server = HttpServer(where.host, where.port, where.has_tls, where.path, read_key(where))
        status, body = await ask(server, "GET", "/v1/models")
        if status != 200:
            raise MessageError(f"/v1/models answers {status}: {refusal_of(status, body).message}; has it a key?")
        model = await self._charged(partial(read_model, body, where.model))
        status, body = await ask(server, "GET", "/metrics")
        has_metrics = status == 200
        self._figures = await self._charged(partial(read_figures, body)) if has_metrics else StrangerFigures()
        question = {"model": model.name, "prompt": PROBE, "add_special_tokens": False}
        status, body = await ask(server, "POST", "/tokenize", question)
        if status == 200:
            await self._charged(partial(check_probe, body, claim.encode(PROBE)))
        else:
            log.info("member %s has no /tokenize: nobody has checked that its tokens are ours", self.address)
        return _Meeting(server, card_of(where, claim, model, self._figures, token_hex(8)), has_metrics)

    async def _talk(self, meeting: _Meeting) -> None:
        """From its welcome to its end. Raises OSError if it cannot be reached any more."""
        self._listener.hear(self, Welcome(PROTOCOL, meeting.card))
        self.is_open = self._has_heard = True
        tasks = [
            asyncio.create_task(self._look(meeting)),
            asyncio.create_task(self._beat()),
            asyncio.create_task(self._is_over.wait()),
        ]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            ends = await asyncio.gather(*tasks, return_exceptions=True)
        for end in ends:
            if isinstance(end, Exception):
                raise end

    async def _look(self, meeting: _Meeting) -> None:
        """Each second: is it there, and how busy? Raises OSError if nobody is, twice; whoever counts beats judges one
        that is slow, or says nothing of use. One that lets nobody in, but whose streams go on, shuts down in order: it
        is left behind their ends."""
        path = "/metrics" if meeting.has_metrics else "/v1/models"
        has_failed = False
        while True:
            await asyncio.sleep(BEAT_S)
            try:
                status, body = await ask(meeting.server, "GET", path, timeout_s=LOOK_TIMEOUT_S)
            except TimeoutError:
                continue
            except OSError as error:
                if self._state == DRAINING and not self._flights:
                    return
                if has_failed and not self._leaves(error):
                    raise
                has_failed = True
                continue
            has_failed = False
            self._has_heard |= status == 200
            if status == 200 and meeting.has_metrics:
                self._figures = await self._charged(partial(read_figures, body))

    async def _charged(self, read: Callable[[], T]) -> T:
        """What it says of itself. Raises MessageError if that took longer than it may."""
        await self._work.turn()
        began_s = thread_time()
        found = read()
        self._work.charge(self._account, WorkKind.MEMBER_STREAM, began_s)
        return found

    async def _beat(self) -> None:
        while True:
            if self._has_heard:
                self._has_heard = False
                self._hear(MemberBeat(self._state, self._report()))
            await asyncio.sleep(BEAT_S)

    def _report(self) -> MemberReport:
        own = [one.flight.num_uncomputed_tokens for one in self._flights.values()]
        return report_of(self._figures, own, self._num_heard)

    # -- what the fleet is told ----------------------------------------------------------------------------------------

    def _tell(self, events: Sequence[RequestEvent]) -> None:
        if events:
            self._hear(MemberStepped(tuple(events)))

    def _hear(self, message: ToGateway) -> None:
        if not self.is_open or self._is_over.is_set():
            return
        try:
            self._listener.hear(self, message)
        except MessageError as error:
            self.distrust(str(error))

    # -- requests ------------------------------------------------------------------------------------------------------

    def _assign(self, command: Submit | Restore, num_uncached_tokens: int) -> None:
        before = self._flights.pop(command.request_id, None)
        if before is not None and before.task is not None:
            before.task.cancel()
        opened = self._flights[command.request_id] = _Open(StrangerFlight(command, num_uncached_tokens))
        opened.task = asyncio.create_task(self._fly(opened))

    def _cancel(self, request_id: str, index: int | None) -> None:
        opened = self._flights.get(request_id)
        if opened is None:
            return
        events = opened.flight.ended(FinishReason.CANCELLED) if index is None else opened.flight.cancelled(index)
        leaving = opened.task if index is None else opened.answers.get(index)
        if leaving is not None:
            leaving.cancel()
        if opened.flight.is_taken:
            opened.all_agreed.set()
        if opened.flight.is_over:
            del self._flights[request_id]
        asyncio.get_running_loop().call_soon(self._tell, events)

    async def _fly(self, opened: _Open) -> None:
        """All answers of one request, from their asking to their ends."""
        flight, command = opened.flight, opened.flight.command
        missing = lacking(command.params, command.grammar, command.namespace.adapter)
        try:
            if missing is not None:
                self._refuse(flight, RequestError(f"no member that is ready can do this: it needs {missing}"))
                return
            async with asyncio.timeout(command.time_left_s), asyncio.TaskGroup() as group:
                for answer in command.continuations:
                    opened.answers[answer.index] = group.create_task(self._answer(opened, answer))
        except TimeoutError:
            self._tell(flight.ended(FinishReason.DEADLINE))
        except ExceptionGroup as failures:
            await self._take_failure(flight, failures.exceptions[0])
        finally:
            if self._flights.get(command.request_id) is opened:
                del self._flights[command.request_id]

    async def _answer(self, opened: _Open, answer: Continuation) -> None:
        """One answer. None of several is told of before the server has agreed to all."""
        flight, meeting = opened.flight, self._meeting
        if meeting is None:
            return
        command, index, info = flight.command, answer.index, meeting.card.info
        body = completion_body(command, answer, meeting.card.model, info.max_sequence_tokens)
        stream = StrangerStream(
            command.prompt + answer.produced, info.vocabulary_size, command.params.logprobs, body["max_tokens"]
        )
        async with opened_exchange(meeting.server, "POST", "/v1/completions", body) as asked:
            status = await asked.head()
            if status != 200:
                raise _RefusedError(refusal_of(status, await asked.whole()), asked.header("retry-after"))
            self._tell(flight.agreed(index))
            if flight.is_taken:
                opened.all_agreed.set()
            await opened.all_agreed.wait()
            await self._follow(asked, flight, index, stream)
        if flight.is_open(index):
            raise ConnectionResetError("a stream ended before its answer had")
        self._tell(flight.over(index))

    async def _follow(self, asked: HttpExchange, flight: StrangerFlight, index: int, stream: StrangerStream) -> None:
        """A stream to its last word, in small pieces: all others on this loop want their turns, too."""
        account = WorkAccount(self.address)
        while data := await asked.read():
            for at in range(0, len(data), PIECE_BYTES):
                await self._work.turn()
                if self._is_over.is_set():
                    return  # another stream of this member was strange
                self._has_heard, began_s = True, thread_time()
                chunk = stream.feed(data[at : at + PIECE_BYTES])
                self._work.charge(account, WorkKind.MEMBER_STREAM, began_s, len(chunk.token_ids))
                for part in chunk.parts(PIECE_TOKENS):
                    await self._work.turn()
                    began_s = thread_time()
                    self._tell(flight.heard(index, part))
                    self._work.count(began_s)
                if chunk.failure is not None:
                    raise _RefusedError(chunk.failure)
                if chunk.is_done:
                    return

    async def _take_failure(self, flight: StrangerFlight, error: Exception) -> None:
        """Whose fault is it? A server that is not well loses all its requests, one that is well this one."""
        if isinstance(error, MessageError):
            self.distrust(str(error))
        elif isinstance(error, _RefusedError):
            await self._take_refusal(flight, error)
        elif isinstance(error, OSError) and not flight.is_taken and self._leaves(error):
            self._refuse(flight, DrainingError("the member that was asked shuts down"))
        elif isinstance(error, OSError):
            await self._break_off(flight, str(error) or type(error).__name__)
        else:
            log.error("an answer of member %s could not be taken in", self.address, exc_info=error)
            self.end(f"{type(error).__name__} here")

    async def _take_refusal(self, flight: StrangerFlight, error: _RefusedError) -> None:
        status, message = error.failure.status, error.failure.message
        if flight.is_taken and status < 500:
            self._tell(flight.ended(FinishReason.ERROR, message))
        elif flight.is_taken and await self._is_well():
            self._tell(flight.ended(FinishReason.ERROR, f"the member that had it broke it off: {message}"))
        elif flight.is_taken:
            # By its own word, and not by a broken connection: nothing was lost, others go on with it.
            self._drain()
            self._refuse(flight, DrainingError(f"the member that had it shuts down: {message}"))
        elif (told := error_of(error.failure, error.retry_after, self._figures.num_waiting)) is not None:
            self._refuse(flight, told)
        elif status >= 500:
            await self._break_off(flight, message)
        else:
            self.distrust(f"/v1/completions answers {status}: {message}")

    def _leaves(self, error: OSError) -> bool:
        """Whether it shuts down in order: it lets nobody in any more, and what it has begun goes on."""
        has_streams = any(one.flight.is_taken for one in self._flights.values())
        if isinstance(error, ConnectionRefusedError) and has_streams:
            self._drain()
        return self._state == DRAINING

    def _drain(self) -> None:
        if self._state != DRAINING:
            self._state, self.problem = DRAINING, "it shuts down"
            log.info("member %s shuts down in order: it gets nothing new", self.address)
            self._hear(MemberBeat(self._state, self._report()))

    async def _break_off(self, flight: StrangerFlight, why: str) -> None:
        """If nobody answers there, all its requests move, this one among them."""
        if await self._is_well():
            self._tell(flight.ended(FinishReason.ERROR, f"the member that had it broke it off: {why}"))
        else:
            self.end(why)

    async def _is_well(self) -> bool:
        if self._meeting is None:
            return False
        try:
            status, _ = await ask(self._meeting.server, "GET", "/health")
        except (OSError, MessageError):
            return False
        return status in (200, 404)

    def _refuse(self, flight: StrangerFlight, error: QuireError) -> None:
        self._tell([Refused.of(flight.command.request_id, error, flight.command.epoch)])

    async def _clear_cache(self) -> None:
        try:
            status = 0 if self._meeting is None else (await ask(self._meeting.server, "POST", "/reset_prefix_cache"))[0]
        except (OSError, MessageError):
            return
        if status != 200:
            log.warning("the cache of member %s cannot be cleared from here: it answers %d", self.address, status)
