"""From a body to a response, for any dialect: read, submit, and send, while watching whether the client disconnects.

    (a body that was charged) ─► generation ─► settle the charge ─► submit ─► pieces ─► the dialect's bytes

Headers are sent with the first bytes of the dialect's writer. Until then any error has a status of its own; afterwards
it is a part of the stream. So keep-alives begin then, too: the first of them would open the stream, and deprive all
errors of a long queue or a long prompt of their status.
"""

import asyncio
import logging
from collections.abc import Awaitable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from time import monotonic
from typing import Any

from msgspec.structs import replace

from quire.api.access.admission import Admission
from quire.api.access.auth import Caller
from quire.api.access.billing import Bill
from quire.api.dialects.body_answers import BodyRequest, BodyResponse, RunBeside, checked_names
from quire.api.dialects.dialect import Address, Dialect, GenerationRequest, PieceBatch, Target
from quire.api.dialects.error_formats import SERVER_ERRORS
from quire.api.http.body import ClientGoneError, parse_object
from quire.api.http.errors import ApiError, ReaderStuckError, api_error_of, invalid
from quire.api.http.limits import ON_LOOP_BYTES, STREAM_SILENT_S
from quire.api.http.request_record import RequestRecord, figures_of
from quire.api.http.sse import COMMENT, HEADERS, Send, send_whole
from quire.api.models.registry import ModelEntry, within_context
from quire.api.prefix.reuse_notes import AnswerIdentity, CacheReport
from quire.client.engines.client import EngineClient
from quire.client.reply.outputs import LOGPROB_BYTES, Piece
from quire.client.reply.reply import Reply
from quire.client.reply.stream import RequestHandle
from quire.client.request.requests import RequestOptions, make_request
from quire.core.step import GRAMMAR_FAILED, UNSATISFIABLE
from quire.errors import WorkBudgetError

LOG = logging.getLogger("quire.api")


class GenerationResponse(BodyResponse):
    """The response of a model, in any dialect."""

    def __init__(self, admission: Admission, caller: Caller, dialect: Dialect) -> None:
        super().__init__(admission, caller)
        self._dialect = dialect
        self._early_fields: tuple[Any, Address] | None = None
        """Of a small body, with the model they address."""

    def check_early(self, body: bytes, record: RequestRecord) -> None:
        """Parse a small body, and refuse it at once if the model's queue would."""
        if len(body) <= ON_LOOP_BYTES:
            self._early_fields = self._addressed(self._parsed(body, record), record)

    async def answer(self, call: BodyRequest) -> None:
        """Submit the requests, and send what comes."""
        head = StreamHead(call.send, self.limits())
        try:
            async with AsyncExitStack() as stack:
                async with call.record.entering():
                    fields, at = self._early_fields or await self._read(call)
                    client = await self._come(at, head, stack)
                    generation = await self._generation(fields, self._target(at, client), call.record)
                await self._answer(generation, call, head)
        except (ReaderStuckError, ClientGoneError):
            raise
        except Exception as error:
            if not head.is_open or head.is_ended:
                raise
            # The stream was opened while the model was loaded: the status is gone.
            await head.end_with(error, call.record)

    def _target(self, at: Address, client: EngineClient) -> Target:
        return Target.of(at, client, self._admission.settings.stable_prefix)

    async def _come(self, at: Address, head: "StreamHead", stack: AsyncExitStack) -> EngineClient:
        """The model, once it is loaded; it stays until the stack is left. A stream gets keep-alives meanwhile."""
        coming = stack.enter_async_context(self._admission.models.using(at.model, self._caller.tenant))
        if at.model.engine_client is not None or not at.is_streamed:
            return await coming
        return await head.kept_alive(coming)

    async def _answer(self, generation: GenerationRequest, call: BodyRequest, head: "StreamHead") -> None:
        record = call.record
        call.bill.settle(record.num_answers, sum(len(ids) for ids in generation.prompts))
        clock = TokenClock(generation.to.model, record, call.bill)
        to = generation.to
        names = AnswerIdentity(generation.writer.answer_id, generation.parts, to.text.tokenizer, to.removed)
        notes = CacheReport(self._admission, record, names)
        try:
            self._submit(generation, record)
            with within_context(generation.to.text.max_sequence_tokens):
                await self._send(generation, call, Sending(clock, head, notes))
        finally:
            notes.close()
            for handle in record.handles:
                handle.close()
            clock.close()
            # What the engine refused or displaced never ran: its zeros would make every latency look good.
            if record.is_let_in and not record.is_displaced:
                self._admission.metrics.observe(figures_of(record))

    async def _read(self, call: BodyRequest) -> tuple[Any, Address]:
        return self._addressed(await self.run(lambda: self._parsed(call.body, call.record)), call.record)

    async def _generation(self, fields: Any, to: Target, record: RequestRecord) -> GenerationRequest:
        generation = await self.run(lambda: self._made(fields, to, record))
        record.is_streamed, record.max_tokens = generation.is_streamed, generation.params.max_tokens
        record.num_answers = generation.params.n * len(generation.prompts)
        return generation

    def _parsed(self, body: bytes, record: RequestRecord) -> Any:
        return self._dialect.parse(checked_names(parse_object(body), self._dialect.names, record))

    def _addressed(self, fields: Any, record: RequestRecord) -> tuple[Any, Address]:
        """The model it addresses. Raises if the queue takes no more of this tenant and class."""
        models = self._admission.models
        at = self._dialect.address(fields, models, self._caller, record.headers)
        models.check_waiting(at.model, self._caller.tenant)
        client = at.model.engine_client
        if client is not None and not record.has_reservation:
            client.reserve_room(self._caller.tenant, at.priority.value)
        record.model, record.priority = at.model.name, at.priority.value
        return fields, at

    def _made(self, fields: Any, to: Target, record: RequestRecord) -> GenerationRequest:
        """The generation with its requests. Runs beside the event loop: its lists may be long."""
        with within_context(to.text.max_sequence_tokens):
            generation = self._dialect.generation(fields, to)
            options = to.options | RequestOptions(has_reservation=record.has_reservation, explain=True)
            requests = [make_request(to.text, ids, generation.params, **options) for ids in generation.prompts]
            return replace(generation, requests=requests)

    def _submit(self, generation: GenerationRequest, record: RequestRecord) -> None:
        budget = self._admission.text_pool.budget
        for request in generation.requests:
            record.handles.append(generation.to.client.submit(request, generation.params, budget))

    async def _send(self, generation: GenerationRequest, call: BodyRequest, beside: "Sending") -> None:
        with Batches(call.record.handles) as batches:
            if generation.is_streamed:
                await Streaming(generation, call, beside, self.run).run(batches)
            else:
                await self._send_whole(generation, call, batches, beside)

    async def _send_whole(
        self, generation: GenerationRequest, call: BodyRequest, batches: "Batches", beside: "Sending"
    ) -> None:
        record = call.record
        async for batch in batches:
            beside.clock.tick(batch)
            if beside.notes.is_waiting:
                beside.notes.take()
            check_finishes(batch, [handle.reply for handle in record.handles])
        if (keep := generation.keep) is not None:
            await self.run(lambda: keep([handle.reply for handle in record.handles]))
        num_bytes = sum(piece.num_bytes for handle in record.handles for piece in handle.reply.pieces)
        num_bytes += prompt_bytes(generation, record.num_prompt_tokens)
        data = await self.sized(num_bytes, lambda: whole_answer(generation, record))
        headers = [*self.limits(), *beside.notes.headers]
        await send_whole(call.send, data, headers, generation.writer.content_type)


class StreamHead:
    """The head of a stream, sent once: with its first bytes, or while its model is still being loaded."""

    def __init__(self, send: Send, limits: Sequence[tuple[bytes, bytes]]) -> None:
        self._send = send
        self._limits = limits
        self.is_open = False
        self.is_ended = False

    async def write(
        self, data: bytes, headers: Sequence[tuple[bytes, bytes]] = HEADERS, *, is_last: bool = False
    ) -> None:
        """Write to the socket; waits while the client reads too slowly."""
        if not self.is_open:
            self.is_open = True
            await self._send({"type": "http.response.start", "status": 200, "headers": [*headers, *self._limits]})
        self.is_ended = is_last
        await self._send({"type": "http.response.body", "body": data, "more_body": not is_last})

    async def kept_alive(self, coming: Awaitable[EngineClient]) -> EngineClient:
        """Wait for the model; during a long wait send comments, which clients of event streams ignore."""
        waiting = asyncio.ensure_future(coming)
        try:
            while not (await asyncio.wait({waiting}, timeout=STREAM_SILENT_S))[0]:
                await self.write(COMMENT)
            return waiting.result()
        finally:
            if not waiting.done():
                waiting.cancel()
                await asyncio.gather(waiting, return_exceptions=True)

    async def end_with(self, error: Exception, record: RequestRecord) -> None:
        """End the stream with an error that came before the dialect's first bytes."""
        refusal = api_error_of(error, record.request_id)
        if refusal.status == 500:
            LOG.error("stream %s failed", record.request_id, exc_info=error)
        record.error = refusal.code
        await self.write(SERVER_ERRORS.at(record.path).event(refusal), is_last=True)


@dataclass(frozen=True, slots=True)
class Sending:
    """What accompanies a response while it is sent."""

    clock: "TokenClock"
    head: StreamHead
    notes: CacheReport


class Streaming:
    """The answers to one request, sent as they come."""

    def __init__(
        self, generation: GenerationRequest, call: BodyRequest, beside: Sending, run_beside: RunBeside
    ) -> None:
        self._generation = generation
        self._writer = generation.writer
        self._record = call.record
        self._clock, self._head, self._notes = beside.clock, beside.head, beside.notes
        self._run_beside = run_beside
        self._replies: list[Reply] = [handle.reply for handle in call.record.handles]
        self._begun: set[int] = set()
        """Prompts whose answers have begun."""
        self._has_written = False

    async def run(self, batches: "Batches") -> None:
        """All pieces, then the end; an error after the first bytes is part of the stream."""
        try:
            async for batch in batches:
                self._clock.tick(batch)
                if data := await self._data(batch):
                    await self._write(data)
                elif not batch and self._generation.to.model.engine_client is None:
                    await self._head.write(COMMENT)  # set aside before its first byte: as while its model loads
            if (keep := self._generation.keep) is not None:
                await self._run_beside(lambda: keep(self._replies))
            self._notes.take()
            await self._write(self._writer.end(self._replies), is_last=True)
        except (ReaderStuckError, asyncio.CancelledError):
            raise
        except Exception as error:
            if not self._has_written:
                raise
            refusal = api_error_of(error, self._record.request_id)
            if refusal.status == 500:
                LOG.exception("stream %s failed", self._record.request_id)
            self._record.error = refusal.code
            await self._write(self._writer.error(refusal), is_last=True)

    async def _data(self, batch: PieceBatch) -> bytes:
        """The bytes that a batch adds; in a pause a keep-alive, once the stream is open. Runs for every token, so it
        is short."""
        if not batch:
            return self._writer.keep_alive if self._has_written else b""
        check_finishes(batch, self._replies)
        if self._num_bytes(batch) <= ON_LOOP_BYTES:
            return self._writer.pieces(self._replies, batch)
        return await self._run_beside(lambda: self._writer.pieces(self._replies, batch))

    def _num_bytes(self, batch: PieceBatch) -> int:
        """About how many bytes there are to write: the pieces, and before the first of a prompt its own tokens."""
        num_bytes = sum([piece.num_bytes for _, piece in batch])
        if len(self._begun) < len(self._replies):
            self._begun.update(prompt_index for prompt_index, _ in batch)
            num_bytes += prompt_bytes(self._generation, self._record.num_prompt_tokens)
        return num_bytes

    async def _write(self, data: bytes, *, is_last: bool = False) -> None:
        """Write to the socket. The first bytes open the stream, if it is not open."""
        headers = self._writer.stream_headers
        if not self._has_written:
            data = self._writer.begin(self._replies) + data
            headers = (*headers, *self._notes.headers)
            self._has_written = True
        await self._head.write(data, headers, is_last=is_last)


class TokenClock:
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


class Batches:
    """All that came for any of a request's prompts, with each prompt's index, until all are done.

    A batch is empty when nothing has come for STREAM_SILENT_S. There is one timer for a request, not one for each wait.
    """

    def __init__(self, handles: Sequence[RequestHandle]) -> None:
        self._handles = handles
        self._ready = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._came_s = self._loop.time()
        self._is_silent = False
        self._timer = self._loop.call_later(STREAM_SILENT_S, self._check_silence)
        for one in handles:
            one.wake(self._ready)

    def __enter__(self) -> "Batches":
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()

    def __aiter__(self) -> "Batches":
        return self

    async def __anext__(self) -> PieceBatch:
        """What came since the last call. Raises a stream's error once all its pieces were taken."""
        while True:
            if not self._ready.is_set() and not self._is_over:
                await self._ready.wait()
            self._ready.clear()
            batch = [(at, piece) for at, one in enumerate(self._handles) for piece in one.take()]
            if batch or self._is_silent:
                self._came_s, self._is_silent = self._loop.time(), False
                return batch
            if self._is_over:
                raise StopAsyncIteration

    @property
    def _is_over(self) -> bool:
        return all(one.is_over for one in self._handles)

    def _check_silence(self) -> None:
        """Emit an empty batch after STREAM_SILENT_S without pieces, and set the timer again."""
        left_s = self._came_s + STREAM_SILENT_S - self._loop.time()
        if left_s <= 0:
            self._is_silent, left_s = True, STREAM_SILENT_S
            self._ready.set()
        self._timer = self._loop.call_later(left_s, self._check_silence)


def whole_answer(generation: GenerationRequest, record: RequestRecord) -> bytes:
    """All answers at once."""
    return generation.writer.whole([handle.reply for handle in record.handles])


def prompt_bytes(generation: GenerationRequest, num_prompt_tokens: int) -> int:
    """About how many bytes the log-probabilities of the prompts take."""
    num_top = generation.params.prompt_logprobs
    return 0 if num_top is None else LOGPROB_BYTES * num_prompt_tokens * (1 + num_top) * generation.params.n


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
