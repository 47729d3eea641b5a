"""A gateway's connection to an OpenAI member, with the same interface as a link to a quire member.

    fleet ── Assign, Cancel ──► link ── POST /v1/completions, one connection for each answer ──► server
    fleet ◄── Welcome, MemberStepped, MemberBeat ◄── link ◄── streams · GET /metrics each second ◄──┘

A session begins when the server has listed its models and its tokenizer matches the gateway's. It ends when the server
is unreachable or sends an invalid message, or when `end` is called. Then its requests move to other members, and the
link reconnects. If a stream breaks while the server is healthy, only that request ends.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from secrets import token_hex
from time import thread_time
from typing import TypeVar

import msgspec

from quire.core.events import Refused, RequestEvent
from quire.core.request import Continuation, FinishReason
from quire.core.work_budget import WorkAccount
from quire.engine.calls import CallReply, EngineCall
from quire.engine.commands import Cancel, ClearCache, Restore, Submit
from quire.errors import DrainingError, MessageError, QuireError, RequestError
from quire.fleet.openai.address import OpenAIAddress, read_key
from quire.fleet.openai.assignment import OpenAIAssignment
from quire.fleet.openai.metrics import OpenAIMetrics, read_metrics
from quire.fleet.openai.model_card import PROBE, ModelClaim, card_of, check_probe, read_model, report_of
from quire.fleet.openai.requests import completion_body, missing_feature
from quire.fleet.openai.stream import OpenAIFailure, OpenAIStream, error_of, refusal_of
from quire.fleet.protocol.link import HEARTBEAT_S, LinkListener, ReconnectingLink
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
from quire.http_client import OK, HttpClient, HttpResponse, ServerAddress, fetch

log = logging.getLogger("quire.fleet")

READY, DRAINING = "ready", "draining"
"""States of a server: a draining server (graceful shutdown) gets no new requests and finishes the open ones."""
T = TypeVar("T")
POLL_TIMEOUT_S = 10.0
"""Timeout of one poll. The fleet's heartbeat timeout may drop the server earlier."""
PIECE_BYTES, PIECE_TOKENS = 4096, 64
"""Sizes of the pieces of a stream; between two pieces, other tasks of the event loop run."""
NO_MODEL_YET = (
    "the model's tokenizer is not known yet, because OpenAI members send none: start a quire member, or start the "
    "gateway with --tokenizer MODEL"
)


class _RefusedError(Exception):
    """The server refused a request, or ended it with an error."""

    def __init__(self, failure: OpenAIFailure, retry_after: str = "") -> None:
        super().__init__(failure.message)
        self.failure = failure
        self.retry_after = retry_after


@dataclass(slots=True)
class _OpenAssignment:
    assignment: OpenAIAssignment
    all_accepted: asyncio.Event = field(default_factory=asyncio.Event)
    task: "asyncio.Task[None] | None" = None
    answers: "dict[int, asyncio.Task[None]]" = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Session:
    """A connected server and the card of its model."""

    server: ServerAddress
    card: MemberCard
    has_metrics: bool


class OpenAIMemberLink(ReconnectingLink):
    """A link to an OpenAI server."""

    is_openai = True

    def __init__(
        self,
        address: OpenAIAddress,
        claim: Callable[[], ModelClaim | None],
        listener: LinkListener,
        work: MemberWork,
    ) -> None:
        super().__init__(address.line)
        self._address = address
        self._claim = claim
        self._listener = listener
        self._work = work
        self._account = WorkAccount(self.address)
        """CPU-time account for this server's polled responses; each answer has a separate account."""
        self._session: _Session | None = None
        self._metrics = OpenAIMetrics()
        self._in_flight: dict[str, _OpenAssignment] = {}
        self._num_received = 0
        self._state = READY
        self._has_received = False
        """Whether the server has responded since the link's last heartbeat to the gateway."""
        self._cache_tasks: set[asyncio.Task[None]] = set()

    # -- the link's interface ------------------------------------------------------------------------------------------

    def send(self, message: ToMember) -> None:
        """Translate a fleet message into HTTP requests. Events are delivered later, never from within this call."""
        if not self.is_open or self._is_over.is_set():
            return
        match message:
            case Assign(command, num_uncached_tokens):
                self._num_received += 1
                self._assign(command, num_uncached_tokens)
            case Cancel(request_id, index):
                self._cancel(request_id, index)
            case EngineCall(call_id):
                error = RequestError("an OpenAI member cannot explain why a prompt is not cached")
                asyncio.get_running_loop().call_soon(self._deliver, CallReply.of(call_id, error))
            case ClearCache():
                task = asyncio.create_task(self._clear_cache())
                self._cache_tasks.add(task)
                task.add_done_callback(self._cache_tasks.discard)
            case _:
                pass  # HTTP servers need no Hello and no heartbeats

    # -- sessions ------------------------------------------------------------------------------------------------------

    async def _run_session(self) -> bool:
        claim = self._claim()
        if claim is None:
            self.problem = NO_MODEL_YET
            return True
        self._is_over = asyncio.Event()
        self._is_trusted, self._num_received, is_healthy = True, 0, False
        self._account = WorkAccount(self.address)
        try:
            session = self._session = await self._open_session(claim)
            await self._serve_session(session)
            is_healthy = self._is_trusted
        except (OSError, QuireError) as error:
            self.problem = str(error) or type(error).__name__
        except Exception as error:  # after any error the link reconnects
            self.problem = f"{type(error).__name__} here"
            log.exception("failed to handle a message from member %s", self.address)
        finally:
            self._session = None
            was_open, self.is_open = self.is_open, False
            if was_open:
                self._listener.on_lost(self, self.problem)
            await self._cancel_all()
        return is_healthy

    async def _cancel_all(self) -> None:
        entries, self._in_flight = self._in_flight, {}
        tasks = [*(entry.task for entry in entries.values() if entry.task is not None), *self._cache_tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _open_session(self, claim: ModelClaim) -> _Session:
        """Check the server and build its card. Raises OSError or QuireError if it cannot be a member."""
        address = self._address
        server = ServerAddress(address.host, address.port, address.has_tls, address.path, read_key(address))
        status, body = await fetch(server, "GET", "/v1/models")
        if status != 200:
            raise MessageError(f"expected /v1/models, got {status}: {refusal_of(status, body).message}; check its key")
        model = await self._parse_charged(partial(read_model, body, address.model))
        status, body = await fetch(server, "GET", "/metrics")
        has_metrics = status == 200
        self._metrics = await self._parse_charged(partial(read_metrics, body)) if has_metrics else OpenAIMetrics()
        request = {"model": model.id, "prompt": PROBE, "add_special_tokens": False}
        status, body = await fetch(server, "POST", "/tokenize", msgspec.json.encode(request))
        if status == 200:
            await self._parse_charged(partial(check_probe, body, claim.encode(PROBE)))
        else:
            log.info("member %s has no /tokenize: its tokenizer is not verified", self.address)
        return _Session(server, card_of(address, claim, model, self._metrics, token_hex(8)), has_metrics)

    async def _serve_session(self, session: _Session) -> None:
        """Run a session to its end. Raises OSError if the server is unreachable, MessageError if it is invalid."""
        self._listener.on_message(self, Welcome(PROTOCOL, session.card))
        self.is_open = self._has_received = True
        tasks = [
            asyncio.create_task(self._poll(session)),
            asyncio.create_task(self._send_heartbeats()),
            asyncio.create_task(self._is_over.wait()),
        ]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
        for result in results:
            if isinstance(result, Exception):
                raise result

    async def _poll(self, session: _Session) -> None:
        """Poll the server's load each second. Raises OSError if it is unreachable twice in a row; slow or failing
        responses only stop heartbeats. If the server shuts down gracefully, return after its last stream."""
        path = "/metrics" if session.has_metrics else "/v1/models"
        has_failed = False
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            try:
                status, body = await fetch(session.server, "GET", path, timeout_s=POLL_TIMEOUT_S)
            except TimeoutError:
                continue
            except OSError as error:
                if self._state == DRAINING and not self._in_flight:
                    return
                if has_failed and not self._is_shutting_down(error):
                    raise
                has_failed = True
                continue
            has_failed = False
            self._has_received |= status == 200
            if status == 200 and session.has_metrics:
                self._metrics = await self._parse_charged(partial(read_metrics, body))

    async def _parse_charged(self, read: Callable[[], T]) -> T:
        """Parse a response and charge the CPU time. Raises MessageError if the time exceeds the budget."""
        await self._work.wait_for_turn()
        start_s = thread_time()
        result = read()
        self._work.charge(self._account, "member_stream", start_s)
        return result

    async def _send_heartbeats(self) -> None:
        while True:
            if self._has_received:
                self._has_received = False
                self._deliver(MemberBeat(self._state, self._report()))
            await asyncio.sleep(HEARTBEAT_S)

    def _report(self) -> MemberReport:
        own_tokens = [entry.assignment.num_uncomputed_tokens for entry in self._in_flight.values()]
        return report_of(self._metrics, own_tokens, self._num_received)

    # -- events --------------------------------------------------------------------------------------------------------

    def _emit(self, events: Sequence[RequestEvent]) -> None:
        if events:
            self._deliver(MemberStepped(tuple(events)))

    def _deliver(self, message: ToGateway) -> None:
        if not self.is_open or self._is_over.is_set():
            return
        try:
            self._listener.on_message(self, message)
        except MessageError as error:
            self.distrust(str(error))

    # -- requests ------------------------------------------------------------------------------------------------------

    def _assign(self, command: Submit | Restore, num_uncached_tokens: int) -> None:
        previous = self._in_flight.pop(command.request_id, None)
        if previous is not None and previous.task is not None:
            previous.task.cancel()
        entry = self._in_flight[command.request_id] = _OpenAssignment(OpenAIAssignment(command, num_uncached_tokens))
        entry.task = asyncio.create_task(self._run_assignment(entry))

    def _cancel(self, request_id: str, index: int | None) -> None:
        entry = self._in_flight.get(request_id)
        if entry is None:
            return
        events = entry.assignment.end(FinishReason.CANCELLED) if index is None else entry.assignment.cancel(index)
        task = entry.task if index is None else entry.answers.get(index)
        if task is not None:
            task.cancel()
        if entry.assignment.is_accepted:
            entry.all_accepted.set()
        if entry.assignment.is_over:
            del self._in_flight[request_id]
        asyncio.get_running_loop().call_soon(self._emit, events)

    async def _run_assignment(self, entry: _OpenAssignment) -> None:
        assignment, command = entry.assignment, entry.assignment.command
        feature = missing_feature(command.params, command.grammar, command.namespace.adapter)
        try:
            if feature is not None:
                self._refuse(assignment, RequestError(f"no ready member can serve this request: it needs {feature}"))
                return
            async with asyncio.timeout(command.time_left_s), asyncio.TaskGroup() as group:
                for answer in command.continuations:
                    entry.answers[answer.index] = group.create_task(self._stream_answer(entry, answer))
        except TimeoutError:
            self._emit(assignment.end(FinishReason.DEADLINE))
        except ExceptionGroup as failures:
            await self._take_failure(assignment, failures.exceptions[0])
        finally:
            if self._in_flight.get(command.request_id) is entry:
                del self._in_flight[command.request_id]

    async def _stream_answer(self, entry: _OpenAssignment, answer: Continuation) -> None:
        """Request and stream one answer. If there are several, no answer has events until all are accepted."""
        assignment, session = entry.assignment, self._session
        if session is None:
            return
        command, index, info = assignment.command, answer.index, session.card.info
        body = completion_body(command, answer, session.card.model, info.max_sequence_tokens)
        stream = OpenAIStream(
            command.prompt + answer.produced, info.vocabulary_size, command.params.logprobs, body["max_tokens"]
        )
        client, path = HttpClient(session.server), "/v1/completions"
        async with client.request("POST", path, msgspec.json.encode(body)) as response:
            if response.status != OK:
                refusal = refusal_of(response.status, await response.read_all())
                raise _RefusedError(refusal, response.headers.get("retry-after", ""))
            self._emit(assignment.accept(index))
            if assignment.is_accepted:
                entry.all_accepted.set()
            await entry.all_accepted.wait()
            await self._read(response, assignment, index, stream)
        if assignment.is_open(index):
            raise ConnectionResetError("a stream ended before its response was complete")
        self._emit(assignment.close_stream(index))

    async def _read(self, response: HttpResponse, state: OpenAIAssignment, index: int, stream: OpenAIStream) -> None:
        """Process a stream to its end, in small pieces so that other tasks of the event loop can run."""
        account = WorkAccount(self.address)
        while data := await response.read():
            for start in range(0, len(data), PIECE_BYTES):
                await self._work.wait_for_turn()
                if self._is_over.is_set():
                    return  # the session has ended, for example because another stream was invalid
                self._has_received, start_s = True, thread_time()
                chunk = stream.feed(data[start : start + PIECE_BYTES])
                self._work.charge(account, "member_stream", start_s, len(chunk.token_ids))
                for part in chunk.parts(PIECE_TOKENS):
                    await self._work.wait_for_turn()
                    start_s = thread_time()
                    self._emit(state.take_chunk(index, part))
                    self._work.count_time(start_s)
                if chunk.failure is not None:
                    raise _RefusedError(chunk.failure)
                if chunk.is_done:
                    return

    async def _take_failure(self, assignment: OpenAIAssignment, error: Exception) -> None:
        """End or refuse this request if the server is healthy; otherwise end the session, which moves all requests."""
        if isinstance(error, MessageError):
            self.distrust(str(error))
        elif isinstance(error, _RefusedError):
            await self._take_refusal(assignment, error)
        elif isinstance(error, OSError) and not assignment.is_accepted and self._is_shutting_down(error):
            self._refuse(assignment, DrainingError("the member is shutting down"))
        elif isinstance(error, OSError):
            await self._end_broken(assignment, str(error) or type(error).__name__)
        else:
            log.error("failed to handle a response of member %s", self.address, exc_info=error)
            self.end(f"{type(error).__name__} here")

    async def _take_refusal(self, assignment: OpenAIAssignment, error: _RefusedError) -> None:
        status, message = error.failure.status, error.failure.message
        if assignment.is_accepted and status < 500:
            self._emit(assignment.end(FinishReason.ERROR, message))
        elif assignment.is_accepted and await self._is_healthy():
            self._emit(assignment.end(FinishReason.ERROR, f"the member aborted the request: {message}"))
        elif assignment.is_accepted:
            # The server is unhealthy, but sent an error and did not break the connection: another member continues.
            self._drain()
            self._refuse(assignment, DrainingError(f"the member is shutting down: {message}"))
        elif (refusal := error_of(error.failure, error.retry_after, self._metrics.num_waiting)) is not None:
            self._refuse(assignment, refusal)
        elif status >= 500:
            await self._end_broken(assignment, message)
        else:
            self.distrust(f"expected an answer of /v1/completions, got {status}: {message}")

    def _is_shutting_down(self, error: OSError) -> bool:
        """Whether the server is shutting down gracefully: it refuses connections, but its streams continue."""
        has_streams = any(entry.assignment.is_accepted for entry in self._in_flight.values())
        if isinstance(error, ConnectionRefusedError) and has_streams:
            self._drain()
        return self._state == DRAINING

    def _drain(self) -> None:
        if self._state != DRAINING:
            self._state, self.problem = DRAINING, "the server is shutting down"
            log.info("member %s is shutting down: sending it no new requests", self.address)
            self._deliver(MemberBeat(self._state, self._report()))

    async def _end_broken(self, assignment: OpenAIAssignment, reason: str) -> None:
        """End this request if the server is healthy; otherwise end the session, so that all its requests move."""
        if await self._is_healthy():
            self._emit(assignment.end(FinishReason.ERROR, f"the member aborted the request: {reason}"))
        else:
            self.end(reason)

    async def _is_healthy(self) -> bool:
        if self._session is None:
            return False
        try:
            status, _ = await fetch(self._session.server, "GET", "/health")
        except (OSError, MessageError):
            return False
        return status in (200, 404)

    def _refuse(self, assignment: OpenAIAssignment, error: QuireError) -> None:
        self._emit([Refused.of(assignment.command.request_id, error, assignment.command.epoch)])

    async def _clear_cache(self) -> None:
        try:
            request = "POST", "/reset_prefix_cache"
            status = 0 if self._session is None else (await fetch(self._session.server, *request))[0]
        except (OSError, MessageError):
            return
        if status != 200:
            log.warning("cannot clear the cache of member %s: it responded with %d", self.address, status)
