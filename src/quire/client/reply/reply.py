"""Convert the events of one request, which have token ids, to pieces of text for its client.

Stop strings end an answer here; its later events are ignored. The caller of `take` must cancel those answers in the
engine (`stopped`), so that the engine stops computing them.

Times are those at which this process receives an event, by its own clock.
"""

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from hashlib import blake2b
from time import monotonic, thread_time
from typing import Protocol, TypeVar

from quire.client.prefix.explanation import Explanation, explanation
from quire.client.prefix.reuse_log import ReuseRecord
from quire.client.reply.outputs import Answer, Completion, Piece, Timings, called, thought
from quire.client.request.params import SamplingParams
from quire.core.events import (
    Admitted,
    Finished,
    FirstToken,
    Preempted,
    PromptLogprobs,
    Queued,
    Refused,
    Replayed,
    RequestEvent,
    SequenceFinished,
    Token,
)
from quire.core.request import Continuation, FinishReason, Request
from quire.core.step import TokenLogprobs
from quire.core.work_budget import WorkAccount
from quire.engine.engine import Clock
from quire.errors import DisplacedError, QuireError, WorkBudgetError
from quire.text.chat.canonical import short_id
from quire.text.detokenizer import AnswerText, Detokenizer
from quire.text.parsers.parts import TEXT, Part, ReasoningPart
from quire.text.parsers.reader import AnswerReader, PartDelta
from quire.text.text_work import TextBudget
from quire.text.tokenizer import Tokenizer

MAX_PAUSES = 16
TOOL_CALLS = "tool_calls"
"""Finish reason of an answer with tool calls."""


class _PartialAnswer:
    def __init__(self, text: Detokenizer, reader: AnswerReader | None) -> None:
        self.text = text
        self.reader = reader
        """Parses reasoning and tool calls; None: the answer is plain text."""
        self.last: Piece | None = None
        self.work_error: WorkBudgetError | None = None
        """Set if parsing the answer exceeded a CPU time budget."""

    @property
    def is_over(self) -> bool:
        return self.last is not None and self.last.finish_reason is not None

    @property
    def part(self) -> Part:
        """The part of the last piece."""
        return TEXT if self.last is None else self.last.part


def _answer(index: int, pieces: Sequence[Piece]) -> Answer:
    """Join the pieces of one answer; an unfinished answer counts as cancelled."""
    last = pieces[-1] if pieces else Piece(index, "")
    return Answer(
        index=index,
        text="".join(piece.text for piece in pieces),
        reasoning=thought(pieces),
        tool_calls=called(pieces),
        token_ids=tuple(token for piece in pieces for token in piece.token_ids),
        finish_reason=last.finish_reason or FinishReason.CANCELLED.value,
        stop_reason=last.stop_reason,
        logprobs=tuple(entry for piece in pieces for entry in piece.logprobs),
        error=last.error,
        error_code=last.error_code,
    )


class Reply:
    """Processes the events of one request in order, and keeps its output and statistics."""

    is_queued = False
    """Whether the engine accepted the request."""
    is_done = False
    """Whether the engine finished or refused the request."""

    def __init__(
        self,
        request: Request,
        params: SamplingParams,
        tokenizer: Tokenizer,
        clock: Clock = monotonic,
        work: TextBudget | None = None,
    ) -> None:
        """`work` is the CPU time budget shared by all replies of an event loop; None: parsing is not limited."""
        self.request = request
        self._params = params
        self._tokenizer = tokenizer
        self._clock = clock
        self._work = work
        self._account = WorkAccount(request.tenant)
        self.work_error: WorkBudgetError | None = None
        """The error of the last answer that was ended because parsing exceeded the budget."""
        self._halves = {one.index: self._begun(one) for one in request.continuations if one.produced}
        """The answers that have begun, by index."""
        self.pieces: list[Piece] = []
        """All pieces so far, in order of arrival."""
        self.num_tokens = 0
        """Tokens of all answers so far."""
        self.num_reasoning_tokens = 0
        """Reasoning tokens so far, counted on arrival because a stream may report usage in every chunk."""
        self.num_cached_tokens = 0
        """Prompt tokens taken from the cache, as reported so far."""
        self.explanation: Explanation | None = None
        """Why the rest of the prompt was not cached when the request was admitted; None unless requested."""
        self.reuse: ReuseRecord | None = None
        """The record of the cache lookup, if a server keeps records."""
        self.num_preemptions = 0
        self.num_replays = 0
        """Number of workers that died while the request was running."""
        self.num_inexact_moves = 0
        """Number of moves to a member with different numerics."""
        self.stopped: list[int] = []
        """Answers ended by a stop string or a budget and not yet cancelled in the engine; the caller of `take` clears
        the list."""
        self.refusal: QuireError | None = None
        """Why the request was refused, or displaced before it ran."""
        self._prompt_logprobs: list[TokenLogprobs] = []
        self._times: dict[str, float] = {}
        self._pauses: deque[tuple[float, float | None]] = deque(maxlen=MAX_PAUSES)
        self._is_paused = False

    def _begun(self, continuation: Continuation) -> _PartialAnswer:
        """Resume an answer after its earlier tokens. Their text was already sent, except text that was held back."""
        half = self._new_half(continuation.index)
        for token_id in continuation.produced:
            text = half.text.push(token_id)
            if half.reader is not None:
                half.reader.push(text)
        return half

    @property
    def is_answered(self) -> bool:
        """Whether all answers have ended."""
        halves = self._halves.values()
        return len(halves) == len(self.request.continuations) and all(half.is_over for half in halves)

    def take(self, events: Sequence[RequestEvent]) -> list[Piece]:
        """Process events and return the pieces they add."""
        added = [piece for event in events for piece in self._take(event)]
        self.pieces += added
        if self._is_paused and added:
            self._resume()
        for piece in added:
            self.num_tokens += len(piece.token_ids)
            if isinstance(piece.part, ReasoningPart):
                self.num_reasoning_tokens += len(piece.token_ids)
        return added

    @property
    def num_longest(self) -> int:
        """Number of tokens of the longest answer so far."""
        counts = Counter[int]()
        for piece in self.pieces:
            counts[piece.index] += len(piece.token_ids)
        return max(counts.values(), default=0)

    @property
    def is_admitted(self) -> bool:
        """Whether the request has left the queue."""
        return "admitted" in self._times

    @property
    def is_computed(self) -> bool:
        """Whether prefill is complete, so that `num_cached_tokens` is final."""
        return "first" in self._times

    @property
    def prompt_logprobs(self) -> tuple[TokenLogprobs, ...]:
        """Log-probabilities of the prompt's tokens after the first, as received so far."""
        return tuple(self._prompt_logprobs)

    @property
    def moments(self) -> Mapping[str, float]:
        """Times of admission (`admitted`), `first` token and `end`, as far as they have occurred."""
        return self._times

    @property
    def pauses(self) -> Sequence[tuple[float, float | None]]:
        """The latest preemptions, as start and end; the end is the next output, None if there was none yet."""
        return self._pauses

    @property
    def timings(self) -> Timings:
        return self.timings_at(self.request.arrival_s)

    def timings_at(self, now_s: float) -> Timings:
        """Return the timings at time `now_s`; phases that have not ended count until then."""
        start = self.request.arrival_s
        end = self._times.get("end", now_s)
        admitted = self._times.get("admitted", end)
        return Timings(admitted - start, self._times.get("first", end) - start, end - start)

    def completion(self) -> Completion:
        """Return the request with all its answers; call it when the reply is done."""
        return Completion(
            request_id=self.request.request_id,
            prompt_token_ids=self.request.prompt,
            answers=tuple(
                _answer(index, [piece for piece in self.pieces if piece.index == index])
                for index in sorted(one.index for one in self.request.continuations)
            ),
            num_cached_tokens=self.num_cached_tokens,
            seed=self.request.seed,
            timings=self.timings,
            prompt_logprobs=self.prompt_logprobs,
            num_preemptions=self.num_preemptions,
            num_replays=self.num_replays,
            num_inexact_moves=self.num_inexact_moves,
            explanation=self.explanation,
        )

    def _take(self, event: RequestEvent) -> list[Piece]:
        match event:
            case Token():
                return self._token(event)
            case SequenceFinished():
                return self._finish(event)
            case FirstToken():
                self._times["first"] = self._clock()
                self.num_cached_tokens = event.num_cached_tokens
            case Queued():
                self.is_queued = True
            case Refused():
                self.refusal, self.is_done = event.error, True
            case Admitted():
                self._times["admitted"] = self._clock() - event.age_s
                self.num_cached_tokens = event.num_cached_tokens
                self.explanation = self._explanation(event)
            case Preempted():
                self.num_preemptions += 1
                self._pause()
            case Replayed():
                self.num_replays += event.is_exact
                self.num_inexact_moves += not event.is_exact
            case PromptLogprobs():
                self._prompt_logprobs += event.logprobs
            case Finished():
                self._times["end"] = self._clock()
                self.num_cached_tokens = event.num_cached_tokens
                self.is_done = True
        return []

    def _pause(self) -> None:
        if not self._is_paused:
            self._pauses.append((self._clock(), None))
            self._is_paused = True

    def _resume(self) -> None:
        start_s, _ = self._pauses.pop()
        self._pauses.append((start_s, self._clock()))
        self._is_paused = False

    def _explanation(self, event: Admitted) -> Explanation | None:
        if event.miss is None:
            return None
        return explanation(self._tokenizer, self.request.namespace, self.request.prompt, event.miss)

    def _half(self, index: int) -> _PartialAnswer:
        half = self._halves.get(index)
        if half is None:
            half = self._halves[index] = self._new_half(index)
        return half

    def _new_half(self, index: int) -> _PartialAnswer:
        form = self._params.answer_format
        if form is None or form.is_plain:
            return _PartialAnswer(self._text(), None)
        return _PartialAnswer(self._text(), AnswerReader(form, partial(self._call_id, index)))

    def _call_id(self, index: int, call_index: int) -> str:
        """Return the id of a tool call; it depends only on the request and the indices, so it is equal on a replay."""
        named = f"{self.request.request_id}/{index}/{call_index}"
        if self._params.answer_format is not None and self._params.answer_format.has_short_ids:
            return short_id(named)
        return "call_" + blake2b(named.encode(), digest_size=12).hexdigest()

    def _text(self) -> Detokenizer:
        tokenizer, prompt, params = self._tokenizer, self.request.prompt, self._params
        shown = frozenset[int]() if params.answer_format is None else params.answer_format.shown_token_ids
        if not params.stop:
            return Detokenizer(tokenizer, prompt, params.skip_special_tokens, shown)
        return AnswerText(
            tokenizer,
            prompt,
            params.stop,
            include_stop=params.include_stop,
            skip_special_tokens=params.skip_special_tokens,
            shown_token_ids=shown,
        )

    def _token(self, event: Token) -> list[Piece]:
        half = self._half(event.sequence_index)
        if half.is_over:
            return []
        logprobs = () if event.logprobs is None else (event.logprobs,)
        if self._is_hidden(event):
            return self._show(half, Piece(event.sequence_index, "", (event.token_id,), logprobs, part=half.part))
        text, stop = half.text.push(event.token_id), half.text.stop
        reason = None if stop is None else FinishReason.STOP.value
        if reason is not None:
            self.stopped.append(event.sequence_index)
        piece = Piece(event.sequence_index, text, (event.token_id,), logprobs, reason, stop)
        if half.reader is None:
            return self._show(half, piece)
        parts = self._read(half, half.reader, text)
        if reason is None and half.work_error is not None:
            self.stopped.append(event.sequence_index)
            reason = FinishReason.ERROR.value
            error = half.work_error
            piece = replace(piece, finish_reason=reason, error=str(error), error_code=error.code)
        if reason is not None:
            parts += half.reader.finish()
        return self._show_parts(half, parts, piece)

    def _read(self, half: _PartialAnswer, reader: AnswerReader, text: str) -> list[PartDelta]:
        """Parse text into parts. If the budget of the request or its tenant is exceeded, set `work_error`."""
        if self._work is None:
            return reader.push(text)
        start_s = thread_time()
        parts = reader.push(text)
        spent_s = thread_time() - start_s
        cut = self._work.spend(self._account, "answer_reader", spent_s, self._clock())
        if cut is not None:
            self.work_error = half.work_error = cut.error
        return parts

    def _is_hidden(self, event: Token) -> bool:
        """Return whether a token is a stop token that ends the answer: it is counted, but its text is not shown."""
        params = self.request.params
        is_last = event.token_id in params.stop_token_ids and event.num_output_tokens > params.min_tokens
        return is_last and not self._params.include_stop

    def _finish(self, event: SequenceFinished) -> list[Piece]:
        if event.retry_after_s is not None:
            self.refusal = DisplacedError(self.request.tenant, event.retry_after_s)
        half = self._half(event.sequence_index)
        if half.is_over:
            return []
        text = half.text.finish()
        stop: str | int | None = half.text.stop
        if stop is None and event.reason is FinishReason.STOP and half.last is not None:
            last = half.last.token_ids[-1]
            stop = last if last in self._params.stop_token_ids else None
        reason = FinishReason.STOP.value if half.text.stop else event.reason.value
        piece = Piece(event.sequence_index, text, (), (), reason, stop, event.error, event.code)
        if half.reader is None:
            return self._show(half, piece)
        parts = [*half.reader.push(text), *half.reader.finish()]
        if half.reader.num_calls and reason == FinishReason.STOP.value:
            piece = replace(piece, finish_reason=TOOL_CALLS)
        return self._show_parts(half, parts, piece)

    def _show_parts(self, half: _PartialAnswer, parts: Sequence[PartDelta], whole: Piece) -> list[Piece]:
        """Make one piece per part; the last has the tokens and the finish reason."""
        *before, last = [Piece(whole.index, one.delta, part=one.part) for one in parts] or [
            Piece(whole.index, "", part=half.part)
        ]
        half.last = replace(whole, delta=last.delta, part=last.part)
        return [*before, half.last]

    @staticmethod
    def _show(half: _PartialAnswer, piece: Piece) -> list[Piece]:
        half.last = piece
        return [piece]


# -- replies that are still open, by request ---------------------------------------------------------------------------

CancelAnswer = Callable[[str, int], None]


class Recipient(Protocol):
    """An open request whose reply gets events."""

    @property
    def reply(self) -> Reply: ...

    def show(self, pieces: list[Piece]) -> None:
        """Handle new pieces. Called without pieces too, for example when the reply is done or refused."""


R = TypeVar("R", bound=Recipient)


def hand_out(events: Sequence[RequestEvent], live: dict[str, R], cancel_answer: CancelAnswer) -> None:
    """Pass each recipient its events. Finished requests are removed from `live`, and answers ended by stop strings are
    cancelled in the engine."""
    own: dict[str, list[RequestEvent]] = {}
    for event in events:
        own.setdefault(event.request_id, []).append(event)
    for request_id, its_events in own.items():
        recipient = live.get(request_id)
        if recipient is None:
            continue
        reply = recipient.reply
        pieces = reply.take(its_events)
        if reply.is_done:
            del live[request_id]
        elif reply.stopped:
            stopped, reply.stopped = reply.stopped, []
            for index in stopped:
                cancel_answer(request_id, index)
        recipient.show(pieces)
