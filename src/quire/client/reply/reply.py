"""Convert the events of one request, which have token ids, to pieces of text for its client.

Stop strings and loops end an answer here; its later events are ignored. The caller of `take` must cancel such answers
in the engine (`stopped_answers`), so that the engine stops computing them.

Times are the times at which this process receives an event, by its own clock.
"""

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from hashlib import blake2b
from time import monotonic, thread_time
from typing import Protocol, TypeVar

from quire.client.prefix.explanation import Explanation, explanation
from quire.client.prefix.prompt_comparison import PromptComparison
from quire.client.prefix.reuse_log import ReuseRecord
from quire.client.reply.loops import LOOP, LoopDetector
from quire.client.reply.outputs import Answer, Completion, Piece, PrefillProgress, Timings, reasoning_of, tool_calls_of
from quire.client.request.params import SamplingParams
from quire.core.events import (
    Admitted,
    Finished,
    FirstToken,
    Preempted,
    PromptLogprobs,
    PromptProgress,
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
    def __init__(self, text: Detokenizer, reader: AnswerReader | None, loops: LoopDetector | None) -> None:
        self.text = text
        self.loops = loops
        """None: loops do not end the answer."""
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


def _build_answer(index: int, pieces: Sequence[Piece]) -> Answer:
    """Build one answer from its pieces; an unfinished answer counts as cancelled."""
    last = pieces[-1] if pieces else Piece(index, "")
    return Answer(
        index=index,
        text="".join(piece.text for piece in pieces),
        reasoning=reasoning_of(pieces),
        tool_calls=tool_calls_of(pieces),
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

    num_tokens = 0
    """Tokens of all answers so far."""
    num_reasoning_tokens = 0
    """Reasoning tokens so far, counted on arrival because a stream may report usage in every chunk."""
    num_cached_tokens = 0
    """Prompt tokens taken from the cache, as reported so far."""
    num_processed_tokens = 0
    """Prompt tokens computed or taken from the cache. Between admission and first token it is updated only if the
    request has `reports_progress`."""
    _num_found_tokens = 0
    """`num_processed_tokens` at admission."""
    num_preemptions = 0
    num_replays = 0
    """Number of workers that died while the request was running."""
    num_inexact_moves = 0
    """Number of moves to a member with different numerics."""

    def __init__(
        self,
        request: Request,
        params: SamplingParams,
        tokenizer: Tokenizer,
        clock: Clock = monotonic,
        work: TextBudget | None = None,
    ) -> None:
        """`work` is the CPU time budget for parsing, shared by all replies of an event loop; None: no limit."""
        self.request = request
        self._params = params
        self._tokenizer = tokenizer
        self._clock = clock
        self._work = work
        self._account = WorkAccount(request.tenant)
        self.work_error: WorkBudgetError | None = None
        """The error of the last answer that was ended because parsing exceeded the budget."""
        self._answers = {one.index: self._resumed_answer(one) for one in request.continuations if one.produced}
        """The answers that have begun, by index."""
        self.pieces: list[Piece] = []
        """All pieces so far, in order of arrival."""
        self._num_written_tokens: int | None = None
        self.num_pinned_tokens = 0
        """Prompt tokens that the request's pins hold."""
        self.explanation: Explanation | None = None
        """Why no more of the prompt was cached when the request was admitted; None unless requested."""
        self.reuse: ReuseRecord | None = None
        """The record of the cache lookup, if the server keeps such records."""
        self.comparison: PromptComparison | None = None
        """The prompt compared with an earlier one that the client named, once the cache lookup is known."""
        self.stopped_answers: list[int] = []
        """Indexes of answers that a stop string, a loop or a budget ended, and that are not cancelled in the engine
        yet; the caller of `take` cancels them and clears the list."""
        self.refusal: QuireError | None = None
        """The error of a request that was refused, or displaced before it ran."""
        self._prompt_logprobs: list[TokenLogprobs] = []
        self._times: dict[str, float] = {}
        self._pauses: deque[tuple[float, float | None]] = deque(maxlen=MAX_PAUSES)
        self._is_paused = False

    def _resumed_answer(self, continuation: Continuation) -> _PartialAnswer:
        """Return an answer in the state after its earlier tokens. Their text was already sent, except withheld text."""
        answer = self._new_answer(continuation.index)
        for token_id in continuation.produced:
            text = answer.text.push(token_id)
            if answer.reader is not None:
                answer.reader.push(text)
            if answer.loops is not None:  # which of these tokens a grammar forced is unknown here
                answer.loops.push(token_id, is_forced=self.request.grammar is not None)
        return answer

    @property
    def is_answered(self) -> bool:
        """Whether all answers have ended."""
        answers = self._answers.values()
        return len(answers) == len(self.request.continuations) and all(answer.is_over for answer in answers)

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
    def max_answer_tokens(self) -> int:
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
    def is_prefilled(self) -> bool:
        """Whether prefill is complete, so that `num_cached_tokens` is final."""
        return "first" in self._times

    @property
    def progress(self) -> PrefillProgress:
        """How much of the prompt is computed now. The time left follows from the rate since admission."""
        num_prompt, num_processed = len(self.request.prompt), self.num_processed_tokens
        elapsed_s, measured_s, left_s = 0.0, 0.0, None
        if self.is_admitted:
            start_s, end_s = self._times["admitted"], self._times.get("first", self._clock())
            elapsed_s, measured_s = end_s - start_s, self._times.get("progress", start_s) - start_s
        num_new = num_processed - self._num_found_tokens
        if num_new > 0:
            left_s = max(0.0, (num_prompt - num_processed) / num_new * measured_s - (elapsed_s - measured_s))
        return PrefillProgress(num_prompt, self.num_cached_tokens, num_processed, elapsed_s, left_s)

    @property
    def num_written_tokens(self) -> int:
        """Prompt tokens that the request added to the cache; 0 until prefill is complete. If the engine does not report
        it, all tokens in full blocks count that were not cached."""
        if not self.is_prefilled or self._num_written_tokens is not None:
            return self._num_written_tokens or 0
        block_size = self.request.namespace.block_size
        num_full = len(self.request.prompt) // block_size * block_size
        return max(0, num_full - self.num_cached_tokens)

    @property
    def prompt_logprobs(self) -> tuple[TokenLogprobs, ...]:
        """Log-probabilities of the prompt's tokens after the first, as received so far."""
        return tuple(self._prompt_logprobs)

    @property
    def times(self) -> Mapping[str, float]:
        """Times of admission (`admitted`), the first token (`first`) and the `end`, as far as these have occurred."""
        return self._times

    @property
    def pauses(self) -> Sequence[tuple[float, float | None]]:
        """The start and end of the latest preemptions. The end is the time of the next output; None: no output yet."""
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
                _build_answer(index, [piece for piece in self.pieces if piece.index == index])
                for index in sorted(continuation.index for continuation in self.request.continuations)
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
                self.num_processed_tokens = len(self.request.prompt)
                self._num_written_tokens = event.num_written_tokens
                self.num_pinned_tokens = event.num_pinned_tokens
            case PromptProgress():
                self._times["progress"] = self._clock()
                self.num_cached_tokens = event.num_cached_tokens
                self.num_processed_tokens = event.num_computed_tokens
            case Queued():
                self.is_queued = True
            case Refused():
                self.refusal, self.is_done = event.error, True
            case Admitted():
                self._times["admitted"] = self._clock() - event.age_s
                self.num_cached_tokens = event.num_cached_tokens
                self.num_processed_tokens = self._num_found_tokens = event.num_cached_tokens
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

    def _answer_at(self, index: int) -> _PartialAnswer:
        answer = self._answers.get(index)
        if answer is None:
            answer = self._answers[index] = self._new_answer(index)
        return answer

    def _new_answer(self, index: int) -> _PartialAnswer:
        answer_format, loops = self._params.answer_format, LoopDetector() if self._params.stop_loops else None
        if answer_format is None or answer_format.is_plain:
            return _PartialAnswer(self._text(), None, loops)
        return _PartialAnswer(self._text(), AnswerReader(answer_format, partial(self._call_id, index)), loops)

    def _call_id(self, index: int, call_index: int) -> str:
        """Return the id of a tool call. It depends only on the request and the indexes, so it is equal on a replay."""
        name = f"{self.request.request_id}/{index}/{call_index}"
        if self._params.answer_format is not None and self._params.answer_format.has_short_ids:
            return short_id(name)
        return "call_" + blake2b(name.encode(), digest_size=12).hexdigest()

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
        answer = self._answer_at(event.sequence_index)
        if answer.is_over:
            return []
        logprobs = () if event.logprobs is None else (event.logprobs,)
        if self._is_hidden(event):
            return self._show(answer, Piece(event.sequence_index, "", (event.token_id,), logprobs, part=answer.part))
        text, stop = answer.text.push(event.token_id), answer.text.stop
        reason = None if stop is None else FinishReason.STOP.value
        if reason is None and answer.loops and answer.loops.push(event.token_id, is_forced=event.is_forced):
            reason, text = LOOP, text + answer.text.finish()
        if reason is not None:
            self.stopped_answers.append(event.sequence_index)
        piece = Piece(event.sequence_index, text, (event.token_id,), logprobs, reason, stop)
        if answer.reader is None:
            return self._show(answer, piece)
        parts = self._read(answer, answer.reader, text)
        if reason is None and answer.work_error is not None:
            self.stopped_answers.append(event.sequence_index)
            reason = FinishReason.ERROR.value
            error = answer.work_error
            piece = replace(piece, finish_reason=reason, error=str(error), error_code=error.code)
        if reason is not None:
            parts += answer.reader.finish()
        return self._show_parts(answer, parts, piece)

    def _read(self, answer: _PartialAnswer, reader: AnswerReader, text: str) -> list[PartDelta]:
        """Parse text into parts. If the budget of the request or its tenant is exceeded, set `work_error`."""
        if self._work is None:
            return reader.push(text)
        start_s = thread_time()
        parts = reader.push(text)
        spent_s = thread_time() - start_s
        exceeded = self._work.spend(self._account, "answer_reader", spent_s, self._clock())
        if exceeded is not None:
            self.work_error = answer.work_error = exceeded.error
        return parts

    def _is_hidden(self, event: Token) -> bool:
        """Return whether a token is a stop token that ends the answer: it is counted, but its text is not shown."""
        params = self.request.params
        is_last = event.token_id in params.stop_token_ids and event.num_output_tokens > params.min_tokens
        return is_last and not self._params.include_stop

    def _finish(self, event: SequenceFinished) -> list[Piece]:
        if event.retry_after_s is not None:
            self.refusal = DisplacedError(self.request.tenant, event.retry_after_s)
        answer = self._answer_at(event.sequence_index)
        if answer.is_over:
            return []
        text = answer.text.finish()
        stop: str | int | None = answer.text.stop
        if stop is None and event.reason is FinishReason.STOP and answer.last is not None:
            last = answer.last.token_ids[-1]
            stop = last if last in self._params.stop_token_ids else None
        reason = FinishReason.STOP.value if answer.text.stop else event.reason.value
        piece = Piece(event.sequence_index, text, (), (), reason, stop, event.error, event.code)
        if answer.reader is None:
            return self._show(answer, piece)
        parts = [*answer.reader.push(text), *answer.reader.finish()]
        if answer.reader.num_calls and reason == FinishReason.STOP.value:
            piece = replace(piece, finish_reason=TOOL_CALLS)
        return self._show_parts(answer, parts, piece)

    def _show_parts(self, answer: _PartialAnswer, parts: Sequence[PartDelta], piece: Piece) -> list[Piece]:
        """Return one piece per part; the last piece has the tokens and the finish reason."""
        *earlier, last = [Piece(piece.index, part.delta, part=part.part) for part in parts] or [
            Piece(piece.index, "", part=answer.part)
        ]
        answer.last = replace(piece, delta=last.delta, part=last.part)
        return [*earlier, answer.last]

    @staticmethod
    def _show(answer: _PartialAnswer, piece: Piece) -> list[Piece]:
        answer.last = piece
        return [piece]


# -- dispatch of events to open requests -------------------------------------------------------------------------------

CancelAnswer = Callable[[str, int], None]


class Recipient(Protocol):
    """An open request whose reply gets events."""

    @property
    def reply(self) -> Reply: ...

    def show(self, pieces: list[Piece]) -> None:
        """Handle new pieces. Also called without pieces, for example when the request has ended or was refused."""


R = TypeVar("R", bound=Recipient)


def dispatch_events(events: Sequence[RequestEvent], recipients: dict[str, R], cancel_answer: CancelAnswer) -> None:
    """Pass each recipient its events. Finished requests are removed from `recipients`. Answers that a stop string, a
    loop or a budget ended are cancelled in the engine."""
    events_of: dict[str, list[RequestEvent]] = {}
    for event in events:
        events_of.setdefault(event.request_id, []).append(event)
    for request_id, request_events in events_of.items():
        recipient = recipients.get(request_id)
        if recipient is None:
            continue
        reply = recipient.reply
        pieces = reply.take(request_events)
        if reply.is_done:
            del recipients[request_id]
        elif reply.stopped_answers:
            indexes, reply.stopped_answers = reply.stopped_answers, []
            for index in indexes:
                cancel_answer(request_id, index)
        recipient.show(pieces)
