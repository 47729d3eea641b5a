"""The open requests of clients, kept so that they survive a worker's crash. Pure: no process, no socket, no clock.

    held ──► assigned ──► last event sent
      ▲         │
      └─ crash ─┘         assigned again as prompt + tokens; the client sees only its next token

A new worker does not know what the client has received. The ledger therefore records it (tokens, ends, cached tokens at
the first admission, prompt log-probabilities), requests only the rest, and forwards only new events. A request with
tokens produced by another server is handled like one whose worker has died.

**Epochs.** Every assignment of a request to a worker has its own number, larger than all earlier ones, and every
event contains the number of its assignment. An assignment is over after its last event, after a crash, or when the
request is taken back. Later or repeated events of it are dropped (`take`).

**Suspects.** A worker records a step's request ids before running the step. A request in flight at two consecutive
crashes, without a token in between, is a suspect. Suspects run alone, one after another, until each has a token or
ends; a suspect in flight when the worker crashes again ends with an error. All other requests wait meanwhile.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

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
from quire.core.step import RowError
from quire.engine.commands import Cancel, Restore, Submit
from quire.errors import MessageError, QuireError

QUARANTINED = "request_quarantined"
POISON = "this request crashed the worker repeatedly, at last while it ran alone, and was quarantined"

STRIKES = 2
"""Number of consecutive crashes without a token in between after which a request must run alone."""


@dataclass(slots=True)
class LedgerEntry:
    """One request, and what its client has received."""

    request: Request
    is_queued: bool = False
    """A worker has queued it; the next worker must not refuse it."""
    epoch: int | None = None
    """Its current assignment; None: it is held, and the worker does not have it."""
    tokens: dict[int, list[int]] = field(default_factory=dict)
    ends: dict[int, FinishReason] = field(default_factory=dict)
    dropped: set[int] = field(default_factory=set)
    """Continuations that were cancelled by this process; events of them are dropped until the worker has ended them."""
    admitted: Admitted | None = None
    num_cached_tokens: int | None = None
    """Prompt tokens that were cached when the prompt was first computed; None before that."""
    first_pass_epoch: int | None = None
    """The assignment that first computed the prompt; its last event may correct the number of cached tokens."""
    num_prompt_logprobs: int = 0
    is_cancelled: bool = False
    num_strikes: int = 0

    @property
    def is_answered(self) -> bool:
        """Whether every continuation has ended, so that nothing is left to request."""
        return len(self.ends) == len(self.tokens)

    @property
    def is_suspect(self) -> bool:
        """Whether the request must run alone."""
        return self.num_strikes >= STRIKES

    @property
    def has_sent_output(self) -> bool:
        """Whether the ledger has forwarded tokens or an end to the client."""
        answers = self.request.continuations
        return bool(self.ends) or any(len(self.tokens[one.index]) > len(one.produced) for one in answers)

    @property
    def left(self) -> tuple[Continuation, ...]:
        """The unfinished continuations, with their tokens so far."""
        return tuple(
            Continuation(one.index, tuple(self.tokens[one.index]))
            for one in self.request.continuations
            if one.index not in self.ends
        )

    def assigned(self, epoch: int, now_s: float) -> Submit | Restore:
        """Return the command for the worker, with the remaining work and the request's age."""
        request = self.request
        kind = Restore if self.is_queued or request.has_begun else Submit
        # A request with output keeps its place, even if the queue is full now.
        has_place = request.has_reservation or bool(self.ends) or any(self.tokens.values())
        return kind.sent(replace(request, epoch=epoch, continuations=self.left, has_reservation=has_place), now_s)


class Ledger:
    """The requests of one model, from submission to their last event."""

    def __init__(self, vocabulary_size: int = 1 << 31, poison: str = POISON) -> None:
        self._poison = poison
        """Error message of quarantined requests."""
        self.entries: dict[str, LedgerEntry] = {}
        self.num_open_of: Counter[str] = Counter()
        self.vocabulary_size = vocabulary_size
        """Vocabulary size of the worker, once it is ready."""
        self.num_progress = 0
        """Number of received tokens, of requests that a worker finished or refused, and of quarantined requests. A
        worker that does not increase it has made no progress."""
        self.num_quarantined = 0
        """Number of requests that crashed a worker while they ran alone."""
        self._held: dict[str, LedgerEntry] = {}
        """Requests that the worker does not have, including suspects."""
        self._assigned: dict[int, LedgerEntry] = {}
        """Requests that the worker has, by epoch."""
        self._last_epoch = 0
        self._alone: LedgerEntry | None = None
        """The suspect that is running alone."""

    def add(self, request: Request) -> None:
        """Add a client's request, which may have tokens already. Request ids are unique and made by the server."""
        entry = LedgerEntry(request, tokens={one.index: [*one.produced] for one in request.continuations})
        if request.has_begun:
            entry.num_prompt_logprobs = len(request.prompt) - 1  # the other server sent them before the first token
        self.entries[request.request_id] = self._held[request.request_id] = entry
        self.num_open_of[request.tenant] += 1

    def names_sent(self) -> tuple[str, ...]:
        """Return the ids of the requests that the worker has."""
        return tuple(entry.request.request_id for entry in self._assigned.values())

    def abandon(self, error: QuireError) -> list[RequestEvent]:
        """Refuse requests that no worker has queued, because no worker will follow. Open streams are not ended here."""
        entries, self.entries, self._held, self._assigned = self.entries, {}, {}, {}
        self.num_open_of.clear()
        return [Refused.of(request_id, error) for request_id, entry in entries.items() if not entry.is_queued]

    # -- to the worker -------------------------------------------------------------------------------------------------

    def due(self, now_s: float) -> list[Submit | Restore | Cancel]:
        """Return the commands that must be sent to the worker now, in order."""
        if self._alone is not None and self._alone.is_suspect:
            return []
        # A request that ran alone without a crash is taken back if another suspect waits.
        self._alone = next((entry for entry in self._held.values() if entry.is_suspect), None)
        if self._alone is None:
            return [self._assign(entry, now_s) for entry in list(self._held.values())]
        return [*self._take_back(), self._assign(self._alone, now_s)]

    def _take_back(self) -> list[Cancel]:
        """Cancel all unfinished assignments; the worker ends them before it receives further commands."""
        taken = [entry for entry in self._assigned.values() if not entry.is_cancelled and not entry.is_answered]
        for entry in taken:
            self._hold(entry)
        return [Cancel(entry.request.request_id) for entry in taken]

    def _assign(self, entry: LedgerEntry, now_s: float) -> Submit | Restore:
        self._last_epoch = entry.epoch = epoch = self._last_epoch + 1
        self._assigned[epoch] = entry
        del self._held[entry.request.request_id]
        return entry.assigned(epoch, now_s)

    def cancel(self, request_id: str) -> tuple[list[Cancel], list[RequestEvent]]:
        """Cancel a request. Returns commands for the worker, or the last events if the worker lacks the request."""
        entry = self.entries.get(request_id)
        if entry is None or entry.is_cancelled:
            return [], []
        entry.is_cancelled = True
        if entry.epoch is None:
            return [], self._end(entry, FinishReason.CANCELLED)
        return [Cancel(request_id)], []

    def cancel_answer(self, request_id: str, index: int) -> tuple[list[Cancel], list[RequestEvent]]:
        """Cancel one continuation. It ends immediately, so that no later worker continues it."""
        entry = self.entries.get(request_id)
        if entry is None or index not in entry.tokens or index in entry.ends:
            return [], []
        if entry.epoch is None and len(entry.ends) + 1 == len(entry.tokens):
            return [], self._end(entry, FinishReason.CANCELLED)
        entry.ends[index] = FinishReason.CANCELLED
        end = SequenceFinished(request_id, index, FinishReason.CANCELLED, len(entry.tokens[index]), None)
        if entry.epoch is None:
            return [], [end]
        entry.dropped.add(index)
        return [Cancel(request_id, index)], [end]

    # -- from the worker -----------------------------------------------------------------------------------------------

    def take(self, events: Sequence[RequestEvent], new_events: list[RequestEvent]) -> None:
        """Append the events that are new to the clients to `new_events`. Raises MessageError for an invalid event.

        Events appended before the error are recorded as sent, so the caller must send them even then.
        """
        for event in events:
            entry = self._assigned.get(event.epoch)
            if entry is None and 0 < event.epoch <= self._last_epoch:
                continue  # its assignment is over
            if entry is None or entry.request.request_id != event.request_id:
                raise MessageError(
                    f"the worker sent an event of {event.request_id[:64]!r} in epoch {event.epoch}, which was not "
                    "assigned",
                    code="event_not_assigned",
                )
            new_events += self._take(entry, event)

    def _take(self, entry: LedgerEntry, event: RequestEvent) -> list[RequestEvent]:
        match event:
            case Token():
                return self._take_token(entry, event)
            case SequenceFinished():
                return self._take_end(entry, event)
            case Finished():
                return self._take_finished(entry, event)
            case Refused():
                return self._take_refusal(entry, event)
            case Queued() | Admitted() | FirstToken():
                return self._take_once(entry, event)
            case PromptLogprobs():
                return self._take_prompt_logprobs(entry, event)
            case Preempted():
                return [event]
            case _:
                raise _unexpected(event)

    def _take_refusal(self, entry: LedgerEntry, event: Refused) -> list[RequestEvent]:
        """The worker refused the request. If the client has output already, the request ends with an error instead."""
        error = event.error
        self.num_progress += 1
        if entry.has_sent_output:
            return self._end(entry, FinishReason.ERROR, RowError(error.code, str(error)))
        self._drop(entry)
        return [event]

    def _take_once(self, entry: LedgerEntry, event: Queued | Admitted | FirstToken) -> list[RequestEvent]:
        """Forward a progress event only once, because each new worker repeats it."""
        if isinstance(event, Queued):
            is_news, entry.is_queued = not entry.is_queued, True
        elif isinstance(event, Admitted):
            is_news, entry.admitted = entry.admitted is None, entry.admitted or event
        else:
            is_news = entry.num_cached_tokens is None
            if is_news:
                entry.num_cached_tokens = self._first_pass(entry, event.num_cached_tokens)
                entry.first_pass_epoch = event.epoch
                event = replace(event, num_cached_tokens=entry.num_cached_tokens)
        return [event] if is_news else []

    def _take_token(self, entry: LedgerEntry, event: Token) -> list[RequestEvent]:
        if event.sequence_index in entry.dropped:
            return []
        tokens = entry.tokens.get(event.sequence_index)
        if tokens is None or event.sequence_index in entry.ends:
            rule = f"a token for answer {event.sequence_index} of {event.request_id}, which is not open"
            raise MessageError(rule, code="answer_not_open")
        if event.num_output_tokens != len(tokens) + 1 or not 0 <= event.token_id < self.vocabulary_size:
            raise MessageError(
                f"token {event.token_id} came as number {event.num_output_tokens} of {event.request_id}, "
                f"which has {len(tokens)}; the vocabulary has {self.vocabulary_size}",
                code="unexpected_token",
            )
        tokens.append(event.token_id)
        entry.num_strikes = 0
        self.num_progress += 1
        return [event]

    def _take_end(self, entry: LedgerEntry, event: SequenceFinished) -> list[RequestEvent]:
        if event.sequence_index in entry.dropped:
            entry.dropped.remove(event.sequence_index)
            return []
        if event.sequence_index not in entry.tokens or event.sequence_index in entry.ends:
            rule = f"the end of answer {event.sequence_index} of {event.request_id}, which is not open"
            raise MessageError(rule, code="answer_not_open")
        if event.reason is FinishReason.CANCELLED and not entry.is_cancelled:
            raise MessageError(f"{event.request_id} ended as cancelled, but was not cancelled", code="not_cancelled")
        is_displaced = event.reason is FinishReason.DISPLACED
        if is_displaced != (event.retry_after_s is not None) or (is_displaced and any(entry.tokens.values())):
            rule = f"{event.request_id} was displaced after output began, or without retry_after"
            raise MessageError(rule, code="invalid_displacement")
        entry.ends[event.sequence_index] = event.reason
        return [event]

    def _take_finished(self, entry: LedgerEntry, event: Finished) -> list[RequestEvent]:
        if entry.dropped or not entry.is_answered:
            raise MessageError(f"{event.request_id} finished before all of its sequences", code="finished_too_early")
        num_cached = self._first_pass(entry, event.num_cached_tokens)
        if entry.num_cached_tokens is None:
            entry.num_cached_tokens = num_cached
        elif entry.first_pass_epoch == event.epoch:  # OpenAI members report it only at the end
            entry.num_cached_tokens = max(entry.num_cached_tokens, num_cached)
        self._drop(entry)
        self.num_progress += 1
        return [self._finished(entry)]

    @staticmethod
    def _first_pass(entry: LedgerEntry, num_cached_tokens: int) -> int:
        """Return the larger number of cached prompt tokens: that of the first admission, or this one."""
        if not 0 <= num_cached_tokens <= len(entry.request.prompt):
            raise MessageError(f"{num_cached_tokens} of {len(entry.request.prompt)} prompt tokens reported as cached")
        return max(num_cached_tokens, 0 if entry.admitted is None else entry.admitted.num_cached_tokens)

    def _take_prompt_logprobs(self, entry: LedgerEntry, event: PromptLogprobs) -> list[RequestEvent]:
        """Forward only new log-probabilities, because each new worker starts again at the first token."""
        end = event.first_position + len(event.logprobs)
        next_position = 1 + entry.num_prompt_logprobs
        if event.first_position > next_position or end > len(entry.request.prompt):
            rule = f"prompt logprobs {event.first_position} to {end} of {event.request_id} are out of order"
            raise MessageError(rule, code="logprobs_out_of_order")
        if end <= next_position:
            return []
        entry.num_prompt_logprobs = end - 1
        return [replace(event, first_position=next_position, logprobs=event.logprobs[next_position - end :])]

    # -- ends ----------------------------------------------------------------------------------------------------------

    def crash(self, in_flight: Iterable[str]) -> list[RequestEvent]:
        """Hold all requests of a crashed worker, and count strikes of those in flight. Returns the resulting events."""
        flying = set(in_flight)
        new_events: list[RequestEvent] = []
        alone = self._alone
        for entry in list(self.entries.values()):
            is_on_trial = entry is alone and entry.is_suspect
            if is_on_trial and entry.request.request_id in flying:
                self.num_progress += 1
                self.num_quarantined += 1
                new_events += self._end(entry, FinishReason.ERROR, RowError(QUARANTINED, self._poison))
            else:
                entry.num_strikes = entry.num_strikes + 1 if entry.request.request_id in flying else _pardoned(entry)
        return new_events + self.set_aside()

    def set_aside(self) -> list[RequestEvent]:
        """Hold all requests of a worker that ended for another reason than a request. Returns the resulting events."""
        new_events: list[RequestEvent] = []
        self._alone = None
        for entry in list(self.entries.values()):
            was_there = entry.is_queued and entry.epoch is not None
            self._hold(entry)
            if entry.is_cancelled or entry.is_answered:
                new_events += self._end(entry, FinishReason.CANCELLED)
            elif was_there:
                new_events.append(Replayed(entry.request.request_id))
        return new_events

    def expire(self, now_s: float) -> list[RequestEvent]:
        """End held requests whose deadline has passed; the worker does so for assigned requests."""
        late = [
            entry
            for entry in self.entries.values()
            if entry.epoch is None and entry.request.deadline_s is not None and entry.request.deadline_s <= now_s
        ]
        return [event for entry in late for event in self._end(entry, FinishReason.DEADLINE)]

    def _end(self, entry: LedgerEntry, reason: FinishReason, error: RowError | None = None) -> list[RequestEvent]:
        """Return the last events of a request that no worker will end."""
        name = entry.request.request_id
        code, message = error or (None, None)
        events: list[RequestEvent] = [
            SequenceFinished(name, index, reason, len(tokens), message, code=code)
            for index, tokens in entry.tokens.items()
            if index not in entry.ends
        ]
        self._drop(entry)
        return [*events, self._finished(entry)]

    @staticmethod
    def _finished(entry: LedgerEntry) -> Finished:
        """The last event of a request, with totals over all its workers."""
        admitted = 0 if entry.admitted is None else entry.admitted.num_cached_tokens
        num_cached = admitted if entry.num_cached_tokens is None else entry.num_cached_tokens
        num_output = sum(len(tokens) for tokens in entry.tokens.values())
        return Finished(entry.request.request_id, len(entry.request.prompt), num_cached, num_output)

    def _hold(self, entry: LedgerEntry) -> None:
        self._end_assignment(entry)
        entry.dropped.clear()
        self._held[entry.request.request_id] = entry

    def _end_assignment(self, entry: LedgerEntry) -> None:
        if entry.epoch is not None:
            del self._assigned[entry.epoch]
            entry.epoch = None

    def _drop(self, entry: LedgerEntry) -> None:
        self._end_assignment(entry)
        del self.entries[entry.request.request_id]
        self.num_open_of[entry.request.tenant] -= 1
        if not self.num_open_of[entry.request.tenant]:
            del self.num_open_of[entry.request.tenant]
        self._held.pop(entry.request.request_id, None)
        if self._alone is entry:
            self._alone = None


def _pardoned(entry: LedgerEntry) -> int:
    """Return the strikes of a request not in flight: a suspect that was held keeps them, others start at 0."""
    return entry.num_strikes if entry.is_suspect and entry.epoch is None else 0


def _unexpected(event: Replayed) -> MessageError:
    """Only the ledger makes `Replayed`. By the argument's type, mypy reports events that `_take` does not handle."""
    return MessageError(f"{event.request_id}: unexpected event Replayed", code="unexpected_event")
