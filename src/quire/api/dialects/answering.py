"""From a body to an answer, for any dialect: read, ask, and send, while watching whether anybody is still there.

    (a body that was charged) ─► question ─► settle the charge ─► ask ─► pieces ─► chunks, or one object

Headers are sent with the first piece. Until then whatever goes wrong has a status of its own; afterwards it is an
event in the stream, and the stream still ends with [DONE].
"""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from time import monotonic, time
from typing import Any

import msgspec

from quire.api.access.admission import Admission
from quire.api.access.auth import Caller
from quire.api.access.billing import Bill
from quire.api.access.request_record import RequestRecord, figures_of
from quire.api.access.text_work import TextWork
from quire.api.asgi import ReaderStuckError
from quire.api.dialects.body_answers import BodyAnswer, BodyRequest
from quire.api.dialects.dialect import Dialect, GenerationRequest, Target, usage
from quire.api.http.body import parse_object
from quire.api.http.errors import ApiError, api_error_of, invalid
from quire.api.http.ids import new_id
from quire.api.http.sse import DONE, SseWriter, error_event, event, send_json
from quire.api.models import within_context
from quire.client.client import RequestHandle
from quire.client.outputs import LOGPROB_BYTES, Piece
from quire.client.reply import Reply
from quire.client.requests import RequestOptions
from quire.core.step import UNSATISFIABLE

LOG = logging.getLogger("quire.api")


class Answering(BodyAnswer):
    """A question to a model, in any dialect."""

    def __init__(self, admission: Admission, caller: Caller, dialect: Dialect) -> None:
        super().__init__(admission, caller)
        self._dialect = dialect

    async def answer(self, call: BodyRequest) -> None:
        """Ask, and send what comes."""
        record = call.record
        async with record.entering():
            generation = await self._question(call.body, call.headers, record)
        call.bill.settle(record.num_answers, sum(len(ids) for ids in generation.prompts))
        clock = TokenClock(self._admission, record, call.bill)
        try:
            self._ask(generation, record)
            with within_context(generation.to.model):
                await self._send(generation, call, clock)
        finally:
            for asked in record.asked:
                asked.close()
            clock.count()
            # What the engine refused or displaced never ran: its zeros would make every latency look good.
            if record.is_let_in and not record.is_displaced:
                self._admission.metrics.observe(figures_of(record))

    async def _question(self, body: bytes, headers: Mapping[bytes, bytes], record: RequestRecord) -> GenerationRequest:
        fields = await self._work.sized(len(body), lambda: self._dialect.parse(parse_object(body)))
        to = self._dialect.target(fields, self._admission.models, self._caller, headers)
        self._admission.check_room(record, to.model.name, self._caller.tenant, to.priority)
        generation = await self._work.run(lambda: self._made(fields, to, record))
        record.is_streamed, record.max_tokens = generation.stream.is_on, generation.params.max_tokens
        record.num_answers = generation.params.n * len(generation.prompts)
        return generation

    def _made(self, fields: Any, to: Target, record: RequestRecord) -> GenerationRequest:
        """The question with the requests it comes to. Beside the event loop: lists in it may be long."""
        with within_context(to.model):
            generation = self._dialect.generation(fields, to)
            engine_client, options = to.model.open(), to.options | RequestOptions(is_promised=record.is_promised)
            return replace(
                generation,
                requests=[engine_client.request(ids, generation.params, **options) for ids in generation.prompts],
            )

    @staticmethod
    def _ask(generation: GenerationRequest, record: RequestRecord) -> None:
        engine_client = generation.to.model.open()
        for request in generation.requests:
            record.asked.append(engine_client.submit(request, generation.params))

    async def _send(self, generation: GenerationRequest, call: BodyRequest, clock: "TokenClock") -> None:
        if generation.stream.is_on:
            writer = SseWriter(call.send, self.limits())
            await Streaming(generation, call.record, writer, clock, self._work).run()
        else:
            await self._send_whole(generation, call, clock)

    async def _send_whole(self, generation: GenerationRequest, call: BodyRequest, clock: "TokenClock") -> None:
        record = call.record
        async for batch in stream_batches(record.asked):
            clock.tick(batch)
            for prompt_index, piece in batch:
                check_finish(piece, record.asked[prompt_index].reply)
        num_bytes = sum(piece.num_bytes for asked in record.asked for piece in asked.reply.pieces)
        num_bytes += prompt_bytes(generation, record.num_prompt_tokens)
        data = await self._work.sized(num_bytes, lambda: whole_answer(generation, record))
        await send_json(call.send, 200, data, self.limits())


class Streaming:
    """The answers to one question as chunks."""

    def __init__(
        self,
        generation: GenerationRequest,
        record: RequestRecord,
        writer: SseWriter,
        clock: "TokenClock",
        work: TextWork,
    ) -> None:
        self._question = generation
        self._record = record
        self._writer = writer
        self._head = head_of(generation, generation.writer.chunk_name)
        self._replies: list[Reply] = [asked.reply for asked in record.asked]
        self._begun: set[int] = set()
        self._clock = clock
        self._work = work

    async def run(self) -> None:
        """All chunks, then the end; an error after the first chunk is part of the stream."""
        try:
            async for batch in stream_batches(self._record.asked):
                self._clock.tick(batch)
                if data := await self._work.sized(self._num_bytes(batch), lambda: self._joined(batch)):  # noqa: B023
                    await self._writer.write(data)
            await self._writer.write(self._end(), is_last=True)
        except (ReaderStuckError, asyncio.CancelledError):
            raise
        except Exception as error:
            if not self._writer.is_open:
                raise
            refusal = api_error_of(error, self._record.request_id)
            if refusal.status == 500:
                LOG.exception("stream %s broke", self._record.request_id)
            self._record.error = refusal.code
            await self._writer.write(error_event(refusal.body), is_last=True)

    def _num_bytes(self, batch: Sequence[tuple[int, Piece]]) -> int:
        """About how much there is to word."""
        num_bytes = sum(piece.num_bytes for _, piece in batch)
        if len(self._begun) < len(self._replies):
            num_bytes += prompt_bytes(self._question, self._record.num_prompt_tokens)
        return num_bytes

    def _joined(self, batch: Sequence[tuple[int, Piece]]) -> bytes:
        return b"".join([chunk for prompt_index, piece in batch for chunk in self._chunks(prompt_index, piece)])

    def _chunks(self, prompt_index: int, piece: Piece) -> list[bytes]:
        check_finish(piece, self._replies[prompt_index])
        writer = self._question.writer
        choices: list[dict[str, Any]] = []
        if prompt_index not in self._begun:
            self._begun.add(prompt_index)
            choices += writer.opening(prompt_index, self._replies[prompt_index])
        if (choice := writer.choice(prompt_index, piece)) is not None:
            choices.append(choice)
        return [event({**self._head, "choices": [choice], **self._usage_field()}) for choice in choices]

    def _usage_field(self) -> dict[str, Any]:
        options = self._question.stream
        if options.with_usage_always:
            return {"usage": self._usage()}
        return {"usage": None} if options.with_usage else {}

    def _end(self) -> bytes:
        if not self._question.stream.with_usage:
            return DONE
        return event({**self._head, "choices": [], "usage": self._usage()}) + DONE

    def _usage(self) -> dict[str, Any]:
        return usage(self._replies, shows_answers=self._question.shows_answers)


class TokenClock:
    """Tokens as they come: counted, charged, and how long they take to follow one another, as the server sees it."""

    def __init__(self, admission: Admission, record: RequestRecord, bill: Bill) -> None:
        self._record = record
        self._bill = bill
        self._observe = admission.metrics.token_gap(record.model)
        self._produced = admission.metrics.tokens_produced(record.model)
        self._num_counted = 0
        self._last_s: dict[tuple[int, int], float] = {}
        """Of each answer to each prompt."""

    def tick(self, batch: Sequence[tuple[int, Piece]]) -> None:
        """These pieces have just come."""
        self.count()
        now_s = monotonic()
        counts: Counter[tuple[int, int]] = Counter()
        for prompt_index, piece in batch:
            counts[prompt_index, piece.index] += len(piece.token_ids)
        for answer, count in counts.items():
            last_s = self._last_s.get(answer)
            if last_s is not None and count:
                for _ in range(count):
                    self._observe((now_s - last_s) / count)
            self._last_s[answer] = now_s

    def count(self) -> None:
        """Charge and count what came since the last time."""
        num_tokens = self._record.num_output_tokens
        self._produced(num_tokens - self._num_counted)
        self._num_counted = num_tokens
        self._bill.count_output(num_tokens)


def whole_answer(generation: GenerationRequest, record: RequestRecord) -> bytes:
    """All choices in one object."""
    replies, writer = [asked.reply for asked in record.asked], generation.writer
    choices = [choice for prompt_index, reply in enumerate(replies) for choice in writer.whole(prompt_index, reply)]
    told = {
        **head_of(generation, writer.object_name),
        "choices": choices,
        "usage": usage(replies, shows_answers=generation.shows_answers),
        **writer.extras(replies),
    }
    return msgspec.json.encode(told)


def prompt_bytes(generation: GenerationRequest, num_prompt_tokens: int) -> int:
    """About how much there is to say of the prompts themselves."""
    wanted = generation.params.prompt_logprobs
    return 0 if wanted is None else LOGPROB_BYTES * num_prompt_tokens * (1 + wanted) * generation.params.n


def head_of(generation: GenerationRequest, object_name: str) -> dict[str, Any]:
    """What the whole answer, or every chunk of it, begins with."""
    return {
        "id": new_id(generation.writer.id_prefix),
        "object": object_name,
        "created": int(time()),
        "model": generation.to.model.name,
    }


def check_finish(piece: Piece, reply: Reply) -> None:
    """Some ends are no answers."""
    if piece.error in UNSATISFIABLE:
        raise invalid(f"the request contradicts itself: {piece.error}")
    if piece.finish_reason == "error":
        LOG.error("a row failed: %s", piece.error)
        raise ApiError(500, "model_error", "the model could not compute this request; ask in other words")
    if piece.finish_reason == "deadline" and not reply.num_tokens:
        raise ApiError(503, "request_timeout", "the request was not done in time; try again", retry_after_s=10)


async def stream_batches(asked: Sequence[RequestHandle]) -> AsyncIterator[list[tuple[int, Piece]]]:
    """All that came for any of the prompts, with each prompt's place, until all are answered."""
    ready = asyncio.Event()
    for one in asked:
        one.stream.wake(ready)
    while True:
        ready.clear()
        batch = [(prompt_index, piece) for prompt_index, one in enumerate(asked) for piece in one.stream.take()]
        if batch:
            yield batch
        elif all(one.stream.is_over for one in asked):
            return
        else:
            await ready.wait()
