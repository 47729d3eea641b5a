"""Serve a request of any dialect (request format of an API): `Dialect.answer` handles it, `StreamResponse` sends.

    slot ─► body ─► charge ─► parse ─► resolve ─► check queue ─► render ─► submit ─► pieces ─► the dialect's bytes
                              └──────────────────── ends when the client disconnects ──────────────────────────┘

HTTP headers are sent with the first bytes from the dialect's writer. Errors before that set the HTTP status; later
errors are events in the stream. A stream is opened by its first token, by its first progress if the client requested
that, or when the client has waited for `first_byte_s` since its body arrived: for the model, in the queue, or for its
prompt. From then on an event follows at least every STREAM_SILENT_S. Whole responses send nothing before their end.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from time import monotonic
from types import TracebackType
from typing import Any, TypeVar

import msgspec

from quire.api.access.admission import Admission
from quire.api.access.auth import Caller
from quire.api.access.billing import Bill, rate_headers
from quire.api.access.conversation_store import KeptConversation
from quire.api.dialects.cache_report import CacheReport
from quire.api.dialects.field_names import FieldNames, ignored_names
from quire.api.dialects.resolved_request import ResolvedRequest, resolve_request
from quire.api.dialects.response_writer import PieceBatch, ResponseWriter, progress_fields
from quire.api.http.body import ClientGoneError, parse_object, while_client_stays
from quire.api.http.errors import ApiError, ReaderStuckError, api_error_of, invalid
from quire.api.http.limits import ON_LOOP_BYTES, STREAM_SILENT_S
from quire.api.http.request_record import RequestRecord, figures_of
from quire.api.http.sse import Send, send_whole
from quire.api.models.registry import ModelEntry, prefix_context_errors
from quire.client.reply.outputs import LOGPROB_BYTES, Piece
from quire.client.reply.reply import Reply
from quire.client.request.requests import make_request
from quire.client.request.text_model import TextModel
from quire.core.request import Request
from quire.core.step import GRAMMAR_FAILED, UNSATISFIABLE
from quire.errors import InvariantError, WorkBudgetError

LOG = logging.getLogger("quire.api")
T = TypeVar("T")


class BodyEndpoint:
    """An ASGI application for a route that accepts a body. It takes an admission slot, reads the body, charges for it,
    and stops when the client disconnects."""

    names: FieldNames
    """The field names that the dialect knows."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Send the response. When this returns or raises, all work of the request has ended."""
        record: RequestRecord = scope["quire.record"]
        try:
            async with self._admission.charged_body(record, scope["quire.caller"], receive) as (body, bill):
                await while_client_stays(receive, self.answer(body, record, bill, send))
        except ClientGoneError:
            record.is_cut = True

    async def answer(self, body: bytes, record: RequestRecord, bill: Bill, send: Send) -> None:
        """Send the whole response."""
        raise NotImplementedError

    def parse(self, body: dict[str, Any]) -> Any:
        """Return the validated fields. Raises ApiError for an invalid body. Pure: may run in a worker thread."""
        raise NotImplementedError

    async def fields_of(self, body: bytes, record: RequestRecord) -> Any:
        """Decode a body's bytes and return its validated fields."""
        return await self.run_sized(
            record, len(body), lambda: self.parse(check_names(parse_object(body), self.names, record))
        )

    async def run(self, record: RequestRecord, work: Callable[[], T]) -> T:
        """Process text in a worker thread, when it is the tenant's turn."""
        return await self._admission.text_pool.run(record.tenant, work)

    async def run_sized(self, record: RequestRecord, num_bytes: int, work: Callable[[], T]) -> T:
        """Run small work here and large work in a worker thread: handing small work over costs more than doing it."""
        return work() if num_bytes <= ON_LOOP_BYTES else await self.run(record, work)


class TextEndpoint(BodyEndpoint):
    """An endpoint that processes text without the engine. Requests are admitted and charged like others. The work is
    always done in a worker thread, because bodies and responses may have megabytes."""

    def result(self, fields: Any, tenant: str, text: TextModel) -> dict[str, Any]:
        """Return the response as a JSON object."""
        raise NotImplementedError

    async def answer(self, body: bytes, record: RequestRecord, bill: Bill, send: Send) -> None:
        models, tenant = self._admission.models, record.tenant
        async with record.before_engine():
            fields = await self.fields_of(body, record)
            async with models.using(models.named(fields.model), tenant) as client:
                data = await self.run(record, lambda: msgspec.json.encode(self.result(fields, tenant, client.text)))
        await send_whole(send, data, limit_headers(bill.caller))


class Dialect(BodyEndpoint):
    """One API's format: converts bodies to engine requests, and engine replies to the bytes of responses.

    Dialects are in the packages next to this file. A dialect does not submit requests, read the engine's output or send
    bytes; this module does. `parse` returns a subclass of `GenerationFields`.
    """

    def render(self, fields: Any, request: ResolvedRequest, text: TextModel) -> ResolvedRequest:
        """Return the request with its prompts as tokens and its sampling parameters. Always runs in a worker thread.
        Lines that the operator configured for removal are left out of system texts."""
        raise NotImplementedError

    def writer(self, fields: Any, request: ResolvedRequest) -> ResponseWriter:
        """Return the writer of the response. The request has no prompts yet, and its model may not be loaded."""
        raise NotImplementedError

    async def answer(self, body: bytes, record: RequestRecord, bill: Bill, send: Send) -> None:
        """Handle one request: parse ─► resolve ─► check queue ─► render ─► submit; then send its output."""
        models, pool = self._admission.models, self._admission.text_pool
        stream = StreamResponse(send, record, bill.caller, self, self._admission.settings.first_byte_s)
        async with stream, AsyncExitStack() as stack:
            async with record.before_engine():
                fields = await self.fields_of(body, record)
                request = resolve_request(fields, models, bill.caller, record)
                self._check_queue(request, record)
                writer = self.writer(fields, request)
                stream.begin(request, writer)
                loading = stack.enter_async_context(models.using(request.model, request.tenant))
                client = await stream.while_waiting(loading)
                text = client.text
                stack.enter_context(prefix_context_errors(text.max_sequence_tokens))
                rendering = self.run(record, lambda: self._render(fields, request, writer, text))
                request, requests = await stream.while_waiting(rendering)
            record.is_streamed, record.max_tokens = request.is_streamed, request.params.max_tokens
            record.num_answers = request.params.n * len(requests)
            meter = TokenMeter(request.model, record, bill)
            stack.callback(self._close, record, meter)
            for engine_request in requests:
                record.handles.append(client.submit(engine_request, request.params, pool.budget))
            bill.settle(record.num_answers, sum(map(len, request.prompts)))
            report = CacheReport(self._admission, record, request, writer, text.tokenizer)
            stack.callback(report.close)
            await stream.read(meter, report)
            if request.conversation is not None:
                await self.run(record, lambda: self._store(request, writer, record))
            await stream.end()

    def _check_queue(self, request: ResolvedRequest, record: RequestRecord) -> None:
        """Raise if the model's queue is full for this tenant and class."""
        model, priority = request.model, request.priority.value
        self._admission.models.check_waiting(model, request.tenant)
        if model.engine_client is not None and not record.has_reservation:
            model.engine_client.reserve_room(request.tenant, priority)
        record.model, record.priority = model.name, priority

    def _render(
        self, fields: Any, request: ResolvedRequest, writer: ResponseWriter, text: TextModel
    ) -> tuple[ResolvedRequest, list[Request]]:
        """Return the request and one engine request per prompt. Runs in a worker thread: prompts may be long."""
        request = self.render(fields, request, text)
        writer.prepare(fields, text)
        is_default = fields.stop_loops is None
        if self._admission.settings.are_loops_stopped if is_default else fields.stop_loops:
            params = replace(request.params, stop_loops=True)
            request = msgspec.structs.replace(request, params=params)
        requests = [make_request(text, ids, request.params, request) for ids in request.prompts]
        pins = request.pins
        return request, [msgspec.structs.replace(one, pins=pins) for one in requests] if pins else requests

    def _store(self, request: ResolvedRequest, writer: ResponseWriter, record: RequestRecord) -> None:
        """Store the conversation under its response's id, now that the response is complete."""
        store, conversation = self._admission.settings.store, request.conversation
        if store is None or conversation is None:
            return
        (handle,) = record.handles
        (answer,) = handle.reply.completion().answers
        messages = [*conversation.messages, *writer.history_messages(answer)]
        complete = KeptConversation(messages, conversation.fields, writer.retrievable(handle.reply))
        if not store.keep(request.tenant, writer.answer_id, complete):
            writer.on_not_stored()

    def _close(self, record: RequestRecord, meter: "TokenMeter") -> None:
        """Finish the request, whether it succeeded or failed: cancel its running prompts, and record its metrics."""
        for handle in record.handles:
            handle.close()
        meter.close()
        # A request that was refused or displaced never ran: its zeros would falsely lower the latency metrics.
        if record.is_accepted and not record.is_displaced:
            self._admission.metrics.observe(figures_of(record))


class StreamResponse:
    """One response while it is sent: waits for the model and for output; sends headers, bytes, and possibly an error.

    Iterating yields batches of pieces, each with the index of its prompt, until all prompts of the request are done. An
    empty batch means that the stream must send something: new progress, or a keep-alive. One timer serves the whole
    request.
    """

    _request: ResolvedRequest
    _writer: ResponseWriter
    _report: CacheReport | None = None

    def __init__(
        self, send: Send, record: RequestRecord, caller: Caller, endpoint: BodyEndpoint, first_byte_s: float
    ) -> None:
        """Created when the body has arrived. `first_byte_s` 0: the first token opens the stream."""
        self._loop = asyncio.get_running_loop()
        self._send = send
        self._record = record
        self._caller = caller
        self._endpoint = endpoint
        self._due_s = self._loop.time() + first_byte_s if first_byte_s else None
        """Time at which the stream sends something, even without output; None: not before its first output."""
        self._is_open = False
        """Whether HTTP headers and the dialect's first bytes were sent."""
        self._is_ended = False
        self._prompts_with_output: set[int] = set()
        """Indices of the prompts for which output was already sent."""
        self._shown_progress: list[int] = []
        """Tokens of each prompt that were computed when progress was last sent."""
        self._is_silent = False
        self._timer: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> "StreamResponse":
        return self

    async def __aexit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        """Send an error as the stream's last event if the headers were sent; otherwise let it propagate."""
        if self._timer is not None:
            self._timer.cancel()
        if not isinstance(error, Exception) or isinstance(error, ReaderStuckError | ClientGoneError):
            return False
        if not self._is_open or self._is_ended:
            return False
        refusal = api_error_of(error, self._record.request_id)
        if refusal.status == 500:
            LOG.error("stream %s failed", self._record.request_id, exc_info=error)
        self._record.error = refusal.code
        await self._write(self._writer.error(refusal), is_last=True)
        return True

    def begin(self, request: ResolvedRequest, writer: ResponseWriter) -> None:
        """Set up sending; from now on a stream may be opened."""
        self._request, self._writer = request, writer
        if not request.is_streamed:
            self._due_s = None

    async def while_waiting(self, work: Awaitable[T]) -> T:
        """Return the work's result; meanwhile send keep-alives when they are due."""
        if self._due_s is None:
            return await work
        task = asyncio.ensure_future(work)
        try:
            while not (await asyncio.wait({task}, timeout=max(0.0, self._due_s - self._loop.time())))[0]:
                await self._keep_alive()
            return task.result()
        finally:
            if not task.done():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    async def read(self, meter: "TokenMeter", report: CacheReport) -> None:
        """Read all pieces; if the response is streamed, send each batch. Short, because it loops for every token."""
        self._report, is_streamed, replies = report, self._request.is_streamed, self._replies
        async for batch in self:
            meter.count(batch)
            check_finishes(batch, replies)
            if is_streamed:
                await self._send_batch(batch, replies)
            elif report.is_waiting:
                report.update()

    async def _send_batch(self, batch: PieceBatch, replies: Sequence[Reply]) -> None:
        if not batch or self._has_new_progress():
            await self._keep_alive()
        if not batch:
            return
        writer = self._writer
        if self._num_bytes(batch, replies) <= ON_LOOP_BYTES:
            data = writer.pieces(replies, batch)
        else:
            data = await self._endpoint.run(self._record, partial(writer.pieces, replies, batch))
        if data or not self._is_open:
            await self._write_part(data)

    async def end(self) -> None:
        """Send the last bytes of a stream, or the whole response."""
        writer, report, replies = self._writer, self._report, self._replies
        if report is None:
            raise InvariantError("expected a response whose output was read, got one before its submission")
        if self._request.is_streamed:
            report.update()
            await self._write_part(writer.end(replies), is_last=True)
            return
        num_bytes = sum(piece.num_bytes for reply in replies for piece in reply.pieces)
        num_bytes += prompt_bytes(self._request, self._record.num_prompt_tokens)
        data = await self._endpoint.run_sized(self._record, num_bytes, lambda: writer.whole(replies))
        headers = [*limit_headers(self._caller), *report.headers]
        await send_whole(self._send, data, headers, writer.content_type)

    @property
    def _replies(self) -> Sequence[Reply]:
        """The replies to all prompts; empty before the submission."""
        return [handle.reply for handle in self._record.handles]

    def _num_bytes(self, batch: PieceBatch, replies: Sequence[Reply]) -> int:
        """Estimate the bytes to write: the pieces and, with a prompt's first piece, the prompt's log-probabilities."""
        num_bytes = sum([piece.num_bytes for _, piece in batch])
        if len(self._prompts_with_output) < len(replies):
            self._prompts_with_output.update(prompt_index for prompt_index, _ in batch)
            num_bytes += prompt_bytes(self._request, self._record.num_prompt_tokens)
        return num_bytes

    async def _keep_alive(self) -> None:
        """Send an event without content; until the first token it has the prompt's progress, if requested."""
        replies = self._replies
        wants_progress = self._request.report_progress and not self._prompts_with_output
        self._shown_progress = _num_processed(replies)
        await self._write_part(self._writer.keep_alive(progress_fields(replies) if wants_progress else None))

    async def _write_part(self, data: bytes, *, is_last: bool = False) -> None:
        """Send bytes of the dialect. The first call opens the stream."""
        if not self._is_open:
            self._is_open = True
            headers = [*self._writer.stream_headers, *limit_headers(self._caller)]
            if self._report is not None:
                self._report.update()  # before the writer, which reports it
                headers += self._report.headers
            data = self._writer.begin(self._replies) + data
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        if data:
            await self._write(data, is_last=is_last)

    async def _write(self, data: bytes, *, is_last: bool = False) -> None:
        """Write to the socket; waits while the client reads too slowly."""
        self._is_ended = is_last
        await self._send({"type": "http.response.body", "body": data, "more_body": not is_last})
        self._due_s = self._loop.time() + STREAM_SILENT_S

    def __aiter__(self) -> "StreamResponse":
        self._ready = asyncio.Event()
        if self._request.is_streamed:
            self._check_silence()
        for handle in self._record.handles:
            handle.wake(self._ready)
        return self

    async def __anext__(self) -> PieceBatch:
        """Return the pieces since the last call. Raises a stream's error after all its pieces were returned."""
        while True:
            if not self._ready.is_set() and not self._is_over:
                await self._ready.wait()
            self._ready.clear()
            batch = [(index, piece) for index, handle in enumerate(self._record.handles) for piece in handle.take()]
            if batch or self._is_silent or self._has_new_progress():
                self._is_silent = False
                return batch
            if self._is_over:
                raise StopAsyncIteration

    @property
    def _is_over(self) -> bool:
        return all(handle.is_over for handle in self._record.handles)

    def _has_new_progress(self) -> bool:
        """Return whether the client requested progress and has not received the newest."""
        if not self._request.report_progress or self._prompts_with_output:
            return False
        replies = self._replies
        return any(reply.is_admitted for reply in replies) and self._shown_progress != _num_processed(replies)

    def _check_silence(self) -> None:
        """Emit an empty batch when something is due, and set the timer again."""
        now_s = self._loop.time()
        left_s = STREAM_SILENT_S if self._due_s is None else self._due_s - now_s
        if left_s <= 0:
            self._is_silent, left_s = True, STREAM_SILENT_S
            self._ready.set()
        # A write may have moved the time that is due to an earlier one.
        self._timer = self._loop.call_later(min(left_s, STREAM_SILENT_S), self._check_silence)


def _num_processed(replies: Sequence[Reply]) -> list[int]:
    return [reply.num_processed_tokens for reply in replies]


class TokenMeter:
    """Counts output tokens as they arrive, charges them, and measures inter-token latency."""

    def __init__(self, model: ModelEntry, record: RequestRecord, bill: Bill) -> None:
        self._record = record
        self._bill = bill
        self._observe_itl, self._count_produced = model.meters
        self._is_charged = bill.caller.quota.tokens is not None
        self._num_counted = 0
        self._last_s: dict[tuple[int, int], float] = {}
        """Time of the last token, by (prompt index, answer index)."""

    def count(self, batch: PieceBatch) -> None:
        """Count the tokens of the pieces that just arrived."""
        now_s = monotonic()
        counts: dict[tuple[int, int], int] = {}
        for prompt_index, piece in batch:
            answer = (prompt_index, piece.index)
            counts[answer] = counts.get(answer, 0) + len(piece.token_ids)
        for answer, count in counts.items():
            last_s = self._last_s.get(answer)
            if last_s is not None and count:
                for _ in range(count):
                    self._observe_itl((now_s - last_s) / count)
            self._last_s[answer] = now_s
        self._set_total(self._num_counted + sum(counts.values()))

    def close(self) -> None:
        """Also count and charge tokens that arrived but were not read."""
        self._set_total(self._record.num_output_tokens)

    def _set_total(self, num_tokens: int) -> None:
        self._count_produced(num_tokens - self._num_counted)
        self._num_counted = num_tokens
        if self._is_charged:
            self._bill.count_output(num_tokens)


def check_names(body: dict[str, Any], names: FieldNames, record: RequestRecord) -> dict[str, Any]:
    """Record unknown field names for a response header, and return the body. Raises ApiError for a misspelt name."""
    record.ignored = ignored_names(body, names)
    return body


def limit_headers(caller: Caller) -> list[tuple[bytes, bytes]]:
    """Return the response headers with the remaining quota of the caller's key."""
    return [(name.encode(), value.encode()) for name, value in rate_headers(caller)]


def prompt_bytes(request: ResolvedRequest, num_prompt_tokens: int) -> int:
    """Estimate the size in bytes of the prompts' log-probabilities."""
    num_top = request.params.prompt_logprobs
    return 0 if num_top is None else LOGPROB_BYTES * num_prompt_tokens * (1 + num_top) * request.params.n


def check_finishes(batch: PieceBatch, replies: Sequence[Reply]) -> None:
    """Raise ApiError if an answer in this batch ended with an error."""
    for prompt_index, piece in batch:
        if piece.finish_reason is not None:
            check_finish(piece, replies[prompt_index])


def check_finish(piece: Piece, reply: Reply) -> None:
    """Raise ApiError if this piece ended its answer with an error."""
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
