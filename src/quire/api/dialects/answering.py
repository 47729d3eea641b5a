"""From a body to a response, for any dialect: the way in is `GenerationResponse.answer`, the way out `StreamResponse`.

    place ─► body ─► charge ─► parse ─► resolve ─► check room ─► render ─► submit ─► pieces ─► the dialect's bytes
                               └──────────────────── ends when the client disconnects ─────────────────────────┘

Headers are sent with the first bytes of the dialect's writer. Until then any error has a status of its own; afterwards
it is a part of the stream. So keep-alives begin then, too: the first of them would open the stream, and deprive all
errors of a long queue or a long prompt of their status.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from functools import partial
from time import monotonic
from types import TracebackType
from typing import Any, Protocol, TypeVar

from msgspec.structs import replace
from starlette.responses import Response

from quire.api.access.admission import Admission
from quire.api.access.auth import Caller
from quire.api.access.billing import Bill, rate_headers
from quire.api.dialects.cache_report import CacheReport
from quire.api.dialects.dialect import Dialect, PieceBatch, ResolvedRequest, ResponseWriter
from quire.api.dialects.error_formats import SERVER_ERRORS
from quire.api.dialects.field_names import FieldNames, ignored_names
from quire.api.http.body import ClientGoneError, parse_object, while_client_stays
from quire.api.http.errors import ApiError, ReaderStuckError, api_error_of, invalid
from quire.api.http.limits import ON_LOOP_BYTES, STREAM_SILENT_S
from quire.api.http.request_record import RequestRecord, figures_of
from quire.api.http.sse import COMMENT, HEADERS, Send, send_whole
from quire.api.models.registry import ModelEntry, within_context
from quire.client.engines.client import EngineClient
from quire.client.reply.outputs import LOGPROB_BYTES, Piece
from quire.client.reply.reply import Reply
from quire.client.request.requests import make_request
from quire.client.request.text_model import TextModel
from quire.core.request import Request
from quire.core.step import GRAMMAR_FAILED, UNSATISFIABLE
from quire.errors import WorkBudgetError

LOG = logging.getLogger("quire.api")
T = TypeVar("T")
TextAnswer = Callable[[dict[str, Any], Admission, Caller], Awaitable[bytes]]
"""The fields of a body, the admission and the caller, to the JSON that is sent."""


class RunBeside(Protocol):
    """Runs work beside the event loop."""

    def __call__(self, work: Callable[[], T], /) -> Awaitable[T]:
        """The result of the work."""
        ...


class BodyResponse(Response):
    """An ASGI response that is made while it is sent: a place, the body, the charge, and an end if the client
    disconnects. A route that takes a body makes one."""

    background = None

    def __init__(self, admission: Admission, caller: Caller) -> None:
        self._admission = admission
        self._caller = caller

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Send the response; nothing is left running, however it ends."""
        record: RequestRecord = scope["quire.record"]
        try:
            async with self._admission.charged_body(record, self._caller, receive) as (body, bill):
                await while_client_stays(receive, self.answer(body, record, bill, send))
        except ClientGoneError:
            record.is_cut = True

    async def answer(self, body: bytes, record: RequestRecord, bill: Bill, send: Send) -> None:
        """Send the whole response."""
        raise NotImplementedError

    async def run(self, work: Callable[[], T]) -> T:
        """Process text beside the event loop, in the tenant's own turn."""
        return await self._admission.text_pool.run(self._caller.tenant, work)

    async def sized(self, num_bytes: int, work: Callable[[], T]) -> T:
        """Small things at once, large ones beside the loop: handing over costs more than a small thing takes."""
        return work() if num_bytes <= ON_LOOP_BYTES else await self.run(work)

    def limits(self) -> list[tuple[bytes, bytes]]:
        """Headers with the rest of the key's quota."""
        return [(name.encode(), value.encode()) for name, value in rate_headers(self._caller)]


class TextResponse(BodyResponse):
    """Work without a model: it takes a place, and is charged for its bytes."""

    def __init__(self, admission: Admission, caller: Caller, names: FieldNames, answer: TextAnswer) -> None:
        super().__init__(admission, caller)
        self._names = names
        self._answer = answer

    async def answer(self, body: bytes, record: RequestRecord, bill: Bill, send: Send) -> None:
        """One JSON object."""
        async with record.before_engine():
            fields = await self.sized(len(body), lambda: checked_names(parse_object(body), self._names, record))
            data = await self._answer(fields, self._admission, self._caller)
        await send_whole(send, data, self.limits())


class GenerationResponse(BodyResponse):
    """The response of a model, in any dialect."""

    def __init__(self, admission: Admission, caller: Caller, dialect: Dialect) -> None:
        super().__init__(admission, caller)
        self._dialect = dialect

    async def answer(self, body: bytes, record: RequestRecord, bill: Bill, send: Send) -> None:
        """The way in: parse ─► resolve ─► check room ─► render ─► submit; then send what comes."""
        dialect, caller, models = self._dialect, self._caller, self._admission.models
        stream = StreamResponse(send, record, self.limits())
        async with stream, AsyncExitStack() as held:
            async with record.before_engine():
                fields = await self.sized(
                    len(body), lambda: dialect.parse(checked_names(parse_object(body), dialect.names, record))
                )
                request = dialect.resolve(fields, models, caller, record.headers)
                self._check_room(request, record)
                loading = held.enter_async_context(models.using(request.model, caller.tenant))
                client = await (stream.kept_alive(loading) if _may_load(request) else loading)
                text = client.text
                request, writer, requests = await self.run(lambda: self._rendered(fields, request, text, record))
            record.is_streamed, record.max_tokens = request.is_streamed, request.params.max_tokens
            record.num_answers = request.params.n * len(requests)
            meter = TokenMeter(request.model, record, bill)
            held.callback(self._close, record, meter)
            for one in requests:
                record.handles.append(client.submit(one, request.params, self._admission.text_pool.budget))
            bill.settle(record.num_answers, sum(map(len, request.prompts)))
            report = CacheReport(self._admission, record, request, writer, text.tokenizer)
            held.callback(report.close)
            with within_context(text.max_sequence_tokens):
                if request.is_streamed:
                    await stream.send_pieces(request, writer, meter, report, self.run)
                else:
                    await self._send_whole(request, writer, meter, report, stream)

    def _check_room(self, request: ResolvedRequest, record: RequestRecord) -> None:
        """Raise if the model's queue takes no more of this tenant and class."""
        model, priority = request.model, request.options.priority.value
        self._admission.models.check_waiting(model, self._caller.tenant)
        if model.engine_client is not None and not record.has_reservation:
            model.engine_client.reserve_room(self._caller.tenant, priority)
        record.model, record.priority = model.name, priority

    def _rendered(
        self, fields: Any, request: ResolvedRequest, text: TextModel, record: RequestRecord
    ) -> tuple[ResolvedRequest, ResponseWriter, list[Request]]:
        """The request and its prompts for the engine. Runs beside the event loop: its lists may be long."""
        with within_context(text.max_sequence_tokens):
            request, writer = self._dialect.render(fields, request, text)
            options = replace(request.options, has_reservation=record.has_reservation, explain=True)
            return request, writer, [make_request(text, ids, request.params, options) for ids in request.prompts]

    async def _send_whole(
        self,
        request: ResolvedRequest,
        writer: ResponseWriter,
        meter: "TokenMeter",
        report: CacheReport,
        stream: "StreamResponse",
    ) -> None:
        handles = stream.record.handles
        async for batch in stream:
            meter.tick(batch)
            if report.is_waiting:
                report.take()
            check_finishes(batch, [handle.reply for handle in handles])
        if (keep := request.keep) is not None:
            await self.run(lambda: keep([handle.reply for handle in handles]))
        num_bytes = sum(piece.num_bytes for handle in handles for piece in handle.reply.pieces)
        num_bytes += prompt_bytes(request, stream.record.num_prompt_tokens)
        data = await self.sized(num_bytes, lambda: whole_answer(writer, stream.record))
        await send_whole(stream.send, data, [*self.limits(), *report.headers], writer.content_type)

    def _close(self, record: RequestRecord, meter: "TokenMeter") -> None:
        """It has ended, however: what still runs of it is cancelled."""
        for handle in record.handles:
            handle.close()
        meter.close()
        # What the engine refused or displaced never ran: its zeros would make every latency look good.
        if record.is_accepted and not record.is_displaced:
            self._admission.metrics.observe(figures_of(record))


def _may_load(request: ResolvedRequest) -> bool:
    """A stream whose model may have to be loaded first gets keep-alives meanwhile."""
    return request.is_streamed and request.model.engine_client is None


class StreamResponse:
    """One response while it is sent: the wait for its model and for pieces, the head, the bytes, an error at the end.

    Iterated over, it is all that comes for any of the request's prompts, with each prompt's index, until all are done.
    A batch is empty when nothing has come for STREAM_SILENT_S. There is one timer for a request, not one for each wait.
    """

    _writer: ResponseWriter
    _report: CacheReport
    _replies: list[Reply]

    def __init__(self, send: Send, record: RequestRecord, limits: Sequence[tuple[bytes, bytes]]) -> None:
        self.send = send
        self.record = record
        self._limits = limits
        self._is_open = False
        """The head was sent: with the first bytes, or while the model was still being loaded."""
        self._has_begun = False
        """The dialect's first bytes were sent."""
        self._is_ended = False
        self._begun: set[int] = set()
        """Prompts whose answers have begun."""
        self._is_silent = False
        self._timer: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> "StreamResponse":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        """An error after the head was sent is the end of the stream; any other one is raised."""
        if self._timer is not None:
            self._timer.cancel()
        if not isinstance(error, Exception) or isinstance(error, ReaderStuckError | ClientGoneError):
            return False
        if not self._is_open or self._is_ended:
            return False
        refusal = api_error_of(error, self.record.request_id)
        if refusal.status == 500:
            LOG.error("stream %s failed", self.record.request_id, exc_info=error)
        self.record.error = refusal.code
        errors = self._writer.error if self._has_begun else SERVER_ERRORS.at(self.record.path).event
        await self._write(errors(refusal), is_last=True)
        return True

    async def kept_alive(self, loading: Awaitable[EngineClient]) -> EngineClient:
        """Wait for the model; during a long wait send comments, which clients of event streams ignore."""
        waiting = asyncio.ensure_future(loading)
        try:
            while not (await asyncio.wait({waiting}, timeout=STREAM_SILENT_S))[0]:
                await self._comment()
            return waiting.result()
        finally:
            if not waiting.done():
                waiting.cancel()
                await asyncio.gather(waiting, return_exceptions=True)

    async def send_pieces(
        self,
        request: ResolvedRequest,
        writer: ResponseWriter,
        meter: "TokenMeter",
        report: CacheReport,
        run_beside: RunBeside,
    ) -> None:
        """All pieces as they come, then the end. Runs for every token, so it is short."""
        replies = self._replies = [handle.reply for handle in self.record.handles]
        self._writer, self._report = writer, report
        async for batch in self:
            meter.tick(batch)
            if batch:
                check_finishes(batch, replies)
                if self._num_bytes(batch, request) <= ON_LOOP_BYTES:
                    data = writer.pieces(replies, batch)
                else:
                    data = await run_beside(partial(writer.pieces, replies, batch))
                if data:
                    await self._write_part(data)
            elif self._has_begun:
                await self._write(writer.keep_alive)
            elif request.model.engine_client is None:
                await self._comment()  # set aside before its first byte: as while its model loads
        if (keep := request.keep) is not None:
            await run_beside(lambda: keep(replies))
        report.take()
        await self._write_part(writer.end(replies), is_last=True)

    def _num_bytes(self, batch: PieceBatch, request: ResolvedRequest) -> int:
        """About how many bytes there are to write: the pieces, and before the first of a prompt its own tokens."""
        num_bytes = sum([piece.num_bytes for _, piece in batch])
        if len(self._begun) < len(self._replies):
            self._begun.update(prompt_index for prompt_index, _ in batch)
            num_bytes += prompt_bytes(request, self.record.num_prompt_tokens)
        return num_bytes

    async def _write_part(self, data: bytes, *, is_last: bool = False) -> None:
        """Bytes of the dialect. The first ones open the stream, if it is not open."""
        if self._has_begun:
            await self._write(data, is_last=is_last)
            return
        self._has_begun = True
        data = self._writer.begin(self._replies) + data
        await self._open((*self._writer.stream_headers, *self._report.headers))
        await self._write(data, is_last=is_last)

    async def _comment(self) -> None:
        await self._open(HEADERS)
        await self._write(COMMENT)

    async def _open(self, headers: Sequence[tuple[bytes, bytes]]) -> None:
        if not self._is_open:
            self._is_open = True
            await self.send({"type": "http.response.start", "status": 200, "headers": [*headers, *self._limits]})

    async def _write(self, data: bytes, *, is_last: bool = False) -> None:
        """Write to the socket; waits while the client reads too slowly."""
        self._is_ended = is_last
        await self.send({"type": "http.response.body", "body": data, "more_body": not is_last})

    def __aiter__(self) -> "StreamResponse":
        self._loop, self._ready = asyncio.get_running_loop(), asyncio.Event()
        self._came_s = self._loop.time()
        self._timer = self._loop.call_later(STREAM_SILENT_S, self._check_silence)
        for one in self.record.handles:
            one.wake(self._ready)
        return self

    async def __anext__(self) -> PieceBatch:
        """What came since the last call. Raises a stream's error once all its pieces were taken."""
        while True:
            if not self._ready.is_set() and not self._is_over:
                await self._ready.wait()
            self._ready.clear()
            batch = [(at, piece) for at, one in enumerate(self.record.handles) for piece in one.take()]
            if batch or self._is_silent:
                self._came_s, self._is_silent = self._loop.time(), False
                return batch
            if self._is_over:
                raise StopAsyncIteration

    @property
    def _is_over(self) -> bool:
        return all(one.is_over for one in self.record.handles)

    def _check_silence(self) -> None:
        """Emit an empty batch after STREAM_SILENT_S without pieces, and set the timer again."""
        left_s = self._came_s + STREAM_SILENT_S - self._loop.time()
        if left_s <= 0:
            self._is_silent, left_s = True, STREAM_SILENT_S
            self._ready.set()
        self._timer = self._loop.call_later(left_s, self._check_silence)


class TokenMeter:
    """Counts and charges tokens as they come, and measures the gaps between them."""

    def __init__(self, model: ModelEntry, record: RequestRecord, bill: Bill) -> None:
        self._record = record
        self._bill = bill
        self._observe_gap, self._produced = model.meters
        self._is_charged = bill.quota.tokens is not None
        self._num_counted = 0
        self._last_s: dict[tuple[int, int], float] = {}
        """Of each answer to each prompt."""

    def tick(self, batch: PieceBatch) -> None:
        """These pieces have just come."""
        now_s = monotonic()
        counts: dict[tuple[int, int], int] = {}
        for prompt_index, piece in batch:
            answer = (prompt_index, piece.index)
            counts[answer] = counts.get(answer, 0) + len(piece.token_ids)
        for answer, count in counts.items():
            last_s = self._last_s.get(answer)
            if last_s is not None and count:
                for _ in range(count):
                    self._observe_gap((now_s - last_s) / count)
            self._last_s[answer] = now_s
        self._count(self._num_counted + sum(counts.values()))

    def close(self) -> None:
        """Charge and count what came and was not taken."""
        self._count(self._record.num_output_tokens)

    def _count(self, num_tokens: int) -> None:
        self._produced(num_tokens - self._num_counted)
        self._num_counted = num_tokens
        if self._is_charged:
            self._bill.count_output(num_tokens)


def checked_names(body: dict[str, Any], names: FieldNames, record: RequestRecord) -> dict[str, Any]:
    """The same body; names that no dialect reads are recorded for a response header. Raises ApiError for misspelt
    ones."""
    record.ignored = ignored_names(body, names)
    return body


def whole_answer(writer: ResponseWriter, record: RequestRecord) -> bytes:
    """All answers at once."""
    return writer.whole([handle.reply for handle in record.handles])


def prompt_bytes(request: ResolvedRequest, num_prompt_tokens: int) -> int:
    """About how many bytes the log-probabilities of the prompts take."""
    num_top = request.params.prompt_logprobs
    return 0 if num_top is None else LOGPROB_BYTES * num_prompt_tokens * (1 + num_top) * request.params.n


def check_finishes(batch: PieceBatch, replies: Sequence[Reply]) -> None:
    """Raise for an answer that ended with an error."""
    for prompt_index, piece in batch:
        if piece.finish_reason is not None:
            check_finish(piece, replies[prompt_index])


def check_finish(piece: Piece, reply: Reply) -> None:
    """Raise if the last piece ended its answer with an error."""
    if piece.error_code == WorkBudgetError.code:
        LOG.warning("%s of %s: %s", WorkBudgetError.code, reply.request.tenant, piece.error)
        raise reply.work_error or invalid(str(piece.error), code=WorkBudgetError.code)
    if piece.error_code == UNSATISFIABLE:
        raise invalid(f"the request contradicts itself: {piece.error}")
    if piece.error_code == GRAMMAR_FAILED:
        raise invalid(f"{piece.error}; use fewer rules")
    if piece.finish_reason == "error":
        LOG.error("a row failed: %s", piece.error)
        message = "the model produced invalid values for this request; try a different prompt"
        raise ApiError(500, "model_error", message)
    if piece.finish_reason == "deadline" and not reply.num_tokens:
        raise ApiError(503, "request_timeout", "the request did not finish in time; try again", retry_after_s=10)
