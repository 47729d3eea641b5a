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

from quire.api.access.admission import Doors
from quire.api.access.auth import Caller
from quire.api.access.billing import Bill
from quire.api.access.request_record import Visit, figures_of
from quire.api.access.text_work import TextWork
from quire.api.asgi import ReaderStuckError
from quire.api.dialects.body_answers import BodyAnswer, Call
from quire.api.dialects.dialect import Addressed, Dialect, Question, usage
from quire.api.http.body import parse_object
from quire.api.http.errors import Refusal, invalid, refusal_of
from quire.api.http.ids import new_id
from quire.api.http.sse import DONE, Writer, error_event, event, send_json
from quire.api.models import within_context
from quire.client.client import Asked
from quire.client.outputs import LOGPROB_BYTES, Piece
from quire.client.reply import Reply
from quire.client.requests import How
from quire.core.step import ASKED_FOR_NOTHING

LOG = logging.getLogger("quire.api")


class Answering(BodyAnswer):
    """A question to a model, in any dialect."""

    def __init__(self, doors: Doors, caller: Caller, dialect: Dialect) -> None:
        super().__init__(doors, caller)
        self._dialect = dialect

    async def answer(self, call: Call) -> None:
        """Ask, and send what comes."""
        visit = call.visit
        async with visit.entering():
            question = await self._question(call.body, call.headers, visit)
        call.bill.settle(visit.num_answers, sum(len(ids) for ids in question.prompts))
        clock = TokenClock(self._doors, visit, call.bill)
        try:
            async with visit.entering():
                await self._ask(question, visit)
            await self._send(question, call, clock)
        finally:
            for asked in visit.asked:
                asked.close()
            clock.count()
            # What the engine refused or displaced never ran: its zeros would make every latency look good.
            if visit.is_let_in and not visit.is_displaced:
                self._doors.metrics.observe(figures_of(visit))

    async def _question(self, body: bytes, headers: Mapping[bytes, bytes], visit: Visit) -> Question:
        fields = await self._work.sized(len(body), lambda: self._dialect.parse(parse_object(body)))
        to = self._dialect.addressed(fields, self._doors.models, self._caller, headers)
        self._doors.check_room(visit, to.model.name, self._caller.tenant, to.priority)
        question = await self._work.run(lambda: self._made(fields, to, visit))
        visit.is_streamed, visit.max_tokens = question.stream.is_on, question.params.max_tokens
        visit.num_answers = question.params.n * len(question.prompts)
        return question

    def _made(self, fields: Any, to: Addressed, visit: Visit) -> Question:
        """The question with the requests it comes to. Beside the event loop: lists in it may be long."""
        with within_context(to.model):
            question = self._dialect.question(fields, to)
            front, how = to.model.open(), to.how | How(is_promised=visit.is_promised)
            return replace(question, requests=[front.request(ids, question.params, **how) for ids in question.prompts])

    async def _ask(self, question: Question, visit: Visit) -> None:
        front = question.to.model.open()
        with within_context(question.to.model):
            for request in question.requests:
                visit.asked.append(await front.submit(request, question.params))
        visit.is_let_in = True

    async def _send(self, question: Question, call: Call, clock: "TokenClock") -> None:
        if question.stream.is_on:
            writer = Writer(call.send, self.limits())
            await Streaming(question, call.visit, writer, clock, self._work).run()
        else:
            await self._send_whole(question, call, clock)

    async def _send_whole(self, question: Question, call: Call, clock: "TokenClock") -> None:
        visit = call.visit
        async for batch in batches(visit.asked):
            clock.tick(batch)
            for place, piece in batch:
                check(piece, visit.asked[place].reply)
        num_bytes = sum(piece.num_bytes for asked in visit.asked for piece in asked.reply.pieces)
        num_bytes += prompt_bytes(question, visit.num_prompt_tokens)
        data = await self._work.sized(num_bytes, lambda: whole_answer(question, visit))
        await send_json(call.send, 200, data, self.limits())


class Streaming:
    """The answers to one question as chunks."""

    def __init__(self, question: Question, visit: Visit, writer: Writer, clock: "TokenClock", work: TextWork) -> None:
        self._question = question
        self._visit = visit
        self._writer = writer
        self._head = head_of(question, question.wording.chunk_name)
        self._replies: list[Reply] = [asked.reply for asked in visit.asked]
        self._begun: set[int] = set()
        self._clock = clock
        self._work = work

    async def run(self) -> None:
        """All chunks, then the end; an error after the first chunk is part of the stream."""
        try:
            async for batch in batches(self._visit.asked):
                self._clock.tick(batch)
                if data := await self._work.sized(self._num_bytes(batch), lambda: self._joined(batch)):  # noqa: B023
                    await self._writer.write(data)
            await self._writer.write(self._end(), is_last=True)
        except (ReaderStuckError, asyncio.CancelledError):
            raise
        except Exception as error:
            if not self._writer.is_open:
                raise
            refusal = refusal_of(error, self._visit.request_id)
            if refusal.status == 500:
                LOG.exception("stream %s broke", self._visit.request_id)
            self._visit.error = refusal.code
            await self._writer.write(error_event(refusal.body), is_last=True)

    def _num_bytes(self, batch: Sequence[tuple[int, Piece]]) -> int:
        """About how much there is to word."""
        num_bytes = sum(piece.num_bytes for _, piece in batch)
        if len(self._begun) < len(self._replies):
            num_bytes += prompt_bytes(self._question, self._visit.num_prompt_tokens)
        return num_bytes

    def _joined(self, batch: Sequence[tuple[int, Piece]]) -> bytes:
        return b"".join([chunk for place, piece in batch for chunk in self._chunks(place, piece)])

    def _chunks(self, place: int, piece: Piece) -> list[bytes]:
        check(piece, self._replies[place])
        wording = self._question.wording
        choices: list[dict[str, Any]] = []
        if place not in self._begun:
            self._begun.add(place)
            choices += wording.opening(place, self._replies[place])
        if (choice := wording.choice(place, piece)) is not None:
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
    """Tokens as they come: counted, charged, and how long they take to follow one another, as the doors see it."""

    def __init__(self, doors: Doors, visit: Visit, bill: Bill) -> None:
        self._visit = visit
        self._bill = bill
        self._observe = doors.metrics.token_gap(visit.model)
        self._produced = doors.metrics.tokens_produced(visit.model)
        self._num_counted = 0
        self._last_s: dict[tuple[int, int], float] = {}
        """Of each answer to each prompt."""

    def tick(self, batch: Sequence[tuple[int, Piece]]) -> None:
        """These pieces have just come."""
        self.count()
        now_s = monotonic()
        counts: Counter[tuple[int, int]] = Counter()
        for place, piece in batch:
            counts[place, piece.index] += len(piece.token_ids)
        for answer, count in counts.items():
            last_s = self._last_s.get(answer)
            if last_s is not None and count:
                for _ in range(count):
                    self._observe((now_s - last_s) / count)
            self._last_s[answer] = now_s

    def count(self) -> None:
        """Charge and count what came since the last time."""
        num_tokens = self._visit.num_output_tokens
        self._produced(num_tokens - self._num_counted)
        self._num_counted = num_tokens
        self._bill.count_output(num_tokens)


def whole_answer(question: Question, visit: Visit) -> bytes:
    """All choices in one object."""
    replies, wording = [asked.reply for asked in visit.asked], question.wording
    choices = [choice for place, reply in enumerate(replies) for choice in wording.whole(place, reply)]
    told = {
        **head_of(question, wording.object_name),
        "choices": choices,
        "usage": usage(replies, shows_answers=question.shows_answers),
        **wording.extras(replies),
    }
    return msgspec.json.encode(told)


def prompt_bytes(question: Question, num_prompt_tokens: int) -> int:
    """About how much there is to say of the prompts themselves."""
    wanted = question.params.prompt_logprobs
    return 0 if wanted is None else LOGPROB_BYTES * num_prompt_tokens * (1 + wanted) * question.params.n


def head_of(question: Question, object_name: str) -> dict[str, Any]:
    """What the whole answer, or every chunk of it, begins with."""
    return {
        "id": new_id(question.wording.id_prefix),
        "object": object_name,
        "created": int(time()),
        "model": question.to.model.name,
    }


def check(piece: Piece, reply: Reply) -> None:
    """Some ends are no answers."""
    if piece.error in ASKED_FOR_NOTHING:
        raise invalid(f"the request contradicts itself: {piece.error}")
    if piece.finish_reason == "error":
        LOG.error("a row failed: %s", piece.error)
        raise Refusal(500, "model_error", "the model could not compute this request; ask in other words")
    if piece.finish_reason == "deadline" and not reply.num_tokens:
        raise Refusal(503, "request_timeout", "the request was not done in time; try again", retry_after_s=10)


async def batches(asked: Sequence[Asked]) -> AsyncIterator[list[tuple[int, Piece]]]:
    """All that came for any of the prompts, with each prompt's place, until all are answered."""
    ready = asyncio.Event()
    for one in asked:
        one.stream.wake(ready)
    while True:
        ready.clear()
        batch = [(place, piece) for place, one in enumerate(asked) for piece in one.stream.take()]
        if batch:
            yield batch
        elif all(one.stream.is_over for one in asked):
            return
        else:
            await ready.wait()
