"""The open requests of clients, recorded so that they survive a worker's crash. No process, no socket, no clock.

    held ──► assigned ──► last event sent
      ▲         │
      └─ crash ─┘         assigned again as prompt + tokens; the client sees only its next token

A new worker does not know what the client has received. The ledger therefore records that (tokens, ends, cached tokens
at the first admission, prompt log-probabilities), requests only the rest, and forwards only new events. A request that
has tokens from another server is handled like one whose worker has died. An *answer* is one of its continuations.

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
    PromptProgress,
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
QUARANTINE_MESSAGE = "this request crashed the worker repeatedly, at last while it ran alone, and was quarantined"

STRIKES = 2
"""Number of consecutive crashes without a token in between after which a request must run alone."""


@dataclass(slots=True)
class LedgerEntry:
    """One request, and what its client has received."""

    request: Request
    is_queued: bool = False
    """Whether a worker has queued the request; then the next worker must not refuse it."""
    epoch: int | None = None
    """The number of the current assignment; None if the request is held, so that no worker has it."""
    tokens: dict[int, list[int]] = field(default_factory=dict)
    ends: dict[int, FinishReason] = field(default_factory=dict)
    dropped_indexes: set[int] = field(default_factory=set)
    """Indexes of answers that this process cancelled; their events are dropped until the worker has ended them."""
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
        """Whether every answer has ended, so that nothing is left to request."""
        return len(self.ends) == len(self.tokens)

    @property
    def is_suspect(self) -> bool:
        """Whether the request must run alone."""
        return self.num_strikes >= STRIKES

    @property
    def has_sent_output(self) -> bool:
        """Whether the ledger has forwarded tokens or an end to the client."""
        answers = self.request.continuations
        return bool(self.ends) or any(len(self.tokens[answer.index]) > len(answer.produced) for answer in answers)

    @property
    def open_answers(self) -> tuple[Continuation, ...]:
        """The unfinished answers, with their tokens so far."""
        return tuple(
            Continuation(answer.index, tuple(self.tokens[answer.index]))
            for answer in self.request.continuations
            if answer.index not in self.ends
        )

    def command_for(self, epoch: int, now_s: float) -> Submit | Restore:
        """Return the command for the worker, with the unfinished answers and the request's age."""
        request, answers = self.request, self.open_answers
        kind = Restore if self.is_queued or request.has_begun else Submit
        # A request with output counts as reserved, so that a full queue does not refuse it.
        is_reserved = request.has_reservation or bool(self.ends) or any(self.tokens.values())
        return kind.of(replace(request, epoch=epoch, continuations=answers, has_reservation=is_reserved), now_s)


class Ledger:
    """The requests of one model, from submission to their last event."""

    def __init__(self, vocabulary_size: int = 1 << 31, quarantine_message: str = QUARANTINE_MESSAGE) -> None:
        self._quarantine_message = quarantine_message
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
        self._held_entries: dict[str, LedgerEntry] = {}
        """Requests that the worker does not have, including suspects."""
        self._by_epoch: dict[int, LedgerEntry] = {}
        """Requests that the worker has, by epoch."""
        self._last_epoch = 0
        self._isolated: LedgerEntry | None = None
        """The request that runs alone because it is, or was, a suspect."""

    def add(self, request: Request) -> None:
        """Add a client's request, which may have tokens already. The server makes request ids, and each only once."""
        entry = LedgerEntry(request, tokens={answer.index: [*answer.produced] for answer in request.continuations})
        if request.has_begun:
            entry.num_prompt_logprobs = len(request.prompt) - 1  # the other server sent them before the first token
        self.entries[request.request_id] = self._held_entries[request.request_id] = entry
        self.num_open_of[request.tenant] += 1

    def assigned_ids(self) -> tuple[str, ...]:
        """Return the ids of the requests that the worker has."""
        return tuple(entry.request.request_id for entry in self._by_epoch.values())

    def abandon(self, error: QuireError) -> list[RequestEvent]:
        """Refuse the requests that no worker has queued: no worker will follow. This does not end open streams."""
        entries, self.entries, self._held_entries, self._by_epoch = self.entries, {}, {}, {}
        self.num_open_of.clear()
        return [Refused.of(request_id, error) for request_id, entry in entries.items() if not entry.is_queued]

    # -- to the worker -------------------------------------------------------------------------------------------------

    def due_commands(self, now_s: float) -> list[Submit | Restore | Cancel]:
        """Return the commands that must be sent to the worker now, in order."""
        if self._isolated is not None and self._isolated.is_suspect:
            return []
        # If another suspect waits, a request that ran alone without a crash is cancelled and held again.
        self._isolated = next((entry for entry in self._held_entries.values() if entry.is_suspect), None)
        if self._isolated is None:
            return [self._assign(entry, now_s) for entry in list(self._held_entries.values())]
        return [*self._take_back(), self._assign(self._isolated, now_s)]

    def _take_back(self) -> list[Cancel]:
        """Hold the requests of all unfinished assignments; return the commands that cancel them at the worker."""
        entries = [entry for entry in self._by_epoch.values() if not entry.is_cancelled and not entry.is_answered]
        for entry in entries:
            self._hold(entry)
        return [Cancel(entry.request.request_id) for entry in entries]

    def _assign(self, entry: LedgerEntry, now_s: float) -> Submit | Restore:
        self._last_epoch = entry.epoch = epoch = self._last_epoch + 1
        self._by_epoch[epoch] = entry
        del self._held_entries[entry.request.request_id]
        return entry.command_for(epoch, now_s)

    def cancel(self, request_id: str) -> tuple[list[Cancel], list[RequestEvent]]:
        """Cancel a request. Returns commands for the worker, or the last events if no worker has the request."""
        entry = self.entries.get(request_id)
        if entry is None or entry.is_cancelled:
            return [], []
        entry.is_cancelled = True
        if entry.epoch is None:
            return [], self._end(entry, FinishReason.CANCELLED)
        return [Cancel(request_id)], []

    def cancel_answer(self, request_id: str, index: int) -> tuple[list[Cancel], list[RequestEvent]]:
        """Cancel one answer. It ends immediately, so that no later worker continues it."""
        entry = self.entries.get(request_id)
        if entry is None or index not in entry.tokens or index in entry.ends:
            return [], []
        if entry.epoch is None and len(entry.ends) + 1 == len(entry.tokens):
            return [], self._end(entry, FinishReason.CANCELLED)
        entry.ends[index] = FinishReason.CANCELLED
        event = SequenceFinished(request_id, index, FinishReason.CANCELLED, len(entry.tokens[index]), None)
        if entry.epoch is None:
            return [], [event]
        entry.dropped_indexes.add(index)
        return [Cancel(request_id, index)], [event]

    # -- from the worker -----------------------------------------------------------------------------------------------

    def take(self, events: Sequence[RequestEvent], new_events: list[RequestEvent]) -> None:
        """Append the events that are new to the clients to `new_events`. Raises MessageError for an invalid event.

        Events appended before the error are recorded as sent, so the caller must send them even then.
        """
        for event in events:
            entry = self._by_epoch.get(event.epoch)
            if entry is None and 0 < event.epoch <= self._last_epoch:
                continue  # its assignment is over
            if entry is None or entry.request.request_id != event.request_id:
                raise MessageError(
                    f"expected an event of an assigned epoch, got {event.epoch} of {event.request_id[:64]!r}",
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
            case PromptProgress():
                return self._take_prompt_progress(entry, event)
            case Preempted():
                return [event]
            case _:
                raise _unexpected_event(event)

    def _take_refusal(self, entry: LedgerEntry, event: Refused) -> list[RequestEvent]:
        """Forward a worker's refusal. If the client has output already, end the request with an error instead."""
        error = event.error
        self.num_progress += 1
        if entry.has_sent_output:
            return self._end(entry, FinishReason.ERROR, RowError(error.code, str(error)))
        self._drop(entry)
        return [event]

    def _take_once(self, entry: LedgerEntry, event: Queued | Admitted | FirstToken) -> list[RequestEvent]:
        """Forward a progress event only once, because each new worker repeats it."""
        if isinstance(event, Queued):
            is_new, entry.is_queued = not entry.is_queued, True
        elif isinstance(event, Admitted):
            is_new, entry.admitted = entry.admitted is None, entry.admitted or event
        else:
            is_new = entry.num_cached_tokens is None
            if is_new:
                entry.num_cached_tokens = self._first_pass(entry, event.num_cached_tokens)
                entry.first_pass_epoch = event.epoch
                self._check_prompt_tokens(entry, event.num_written_tokens or 0)
                self._check_prompt_tokens(entry, event.num_pinned_tokens)
                event = replace(event, num_cached_tokens=entry.num_cached_tokens)
        return [event] if is_new else []

    @staticmethod
    def _take_prompt_progress(entry: LedgerEntry, event: PromptProgress) -> list[RequestEvent]:
        """Forward progress until the first token; after that, a new worker computes the prompt again, unseen."""
        num_prompt = len(entry.request.prompt)
        for count in (event.num_computed_tokens, event.num_cached_tokens):
            if not 0 <= count <= num_prompt:
                raise MessageError(f"expected 0 to {num_prompt} prompt tokens, got {count}", code="invalid_progress")
        return [event] if entry.num_cached_tokens is None else []

    def _take_token(self, entry: LedgerEntry, event: Token) -> list[RequestEvent]:
        if event.sequence_index in entry.dropped_indexes:
            return []
        tokens = entry.tokens.get(event.sequence_index)
        if tokens is None or event.sequence_index in entry.ends:
            message = f"expected a token of an open answer, got one of {event.sequence_index} of {event.request_id}"
            raise MessageError(message, code="answer_not_open")
        if event.num_output_tokens != len(tokens) + 1 or not 0 <= event.token_id < self.vocabulary_size:
            raise MessageError(
                f"expected token {len(tokens) + 1} of {event.request_id}, with an id below {self.vocabulary_size}, got "
                f"token {event.num_output_tokens} with id {event.token_id}",
                code="unexpected_token",
            )
        tokens.append(event.token_id)
        entry.num_strikes = 0
        self.num_progress += 1
        return [event]

    def _take_end(self, entry: LedgerEntry, event: SequenceFinished) -> list[RequestEvent]:
        if event.sequence_index in entry.dropped_indexes:
            entry.dropped_indexes.remove(event.sequence_index)
            return []
        if event.sequence_index not in entry.tokens or event.sequence_index in entry.ends:
            message = f"expected the end of an open answer, got {event.sequence_index} of {event.request_id}"
            raise MessageError(message, code="answer_not_open")
        if event.reason is FinishReason.CANCELLED and not entry.is_cancelled:
            raise MessageError(f"expected no cancelled end of {event.request_id}, got one", code="not_cancelled")
        is_displaced = event.reason is FinishReason.DISPLACED
        if is_displaced != (event.retry_after_s is not None) or (is_displaced and any(entry.tokens.values())):
            message = f"{event.request_id} was displaced after output began, or without retry_after"
            raise MessageError(message, code="invalid_displacement")
        entry.ends[event.sequence_index] = event.reason
        return [event]

    def _take_finished(self, entry: LedgerEntry, event: Finished) -> list[RequestEvent]:
        if entry.dropped_indexes or not entry.is_answered:
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
        """Return the larger number of cached prompt tokens: that of the first admission, or `num_cached_tokens`."""
        Ledger._check_prompt_tokens(entry, num_cached_tokens)
        return max(num_cached_tokens, 0 if entry.admitted is None else entry.admitted.num_cached_tokens)

    @staticmethod
    def _check_prompt_tokens(entry: LedgerEntry, num_tokens: int) -> None:
        if not 0 <= num_tokens <= len(entry.request.prompt):
            raise MessageError(f"expected 0 to {len(entry.request.prompt)} cached tokens, got {num_tokens}")

    def _take_prompt_logprobs(self, entry: LedgerEntry, event: PromptLogprobs) -> list[RequestEvent]:
        """Forward only new log-probabilities, because each new worker starts again at the first token."""
        end_position = event.first_position + len(event.logprobs)
        next_position = 1 + entry.num_prompt_logprobs
        if event.first_position > next_position or end_position > len(entry.request.prompt):
            message = f"prompt logprobs {event.first_position} to {end_position} of {event.request_id} are out of order"
            raise MessageError(message, code="logprobs_out_of_order")
        if end_position <= next_position:
            return []
        entry.num_prompt_logprobs = end_position - 1
        return [replace(event, first_position=next_position, logprobs=event.logprobs[next_position - end_position :])]

    # -- ends ----------------------------------------------------------------------------------------------------------

    def record_crash(self, request_ids: Iterable[str]) -> list[RequestEvent]:
        """Hold all requests of a crashed worker; those in flight get a strike. Returns the resulting events."""
        in_flight = set(request_ids)
        new_events: list[RequestEvent] = []
        isolated_entry = self._isolated
        for entry in list(self.entries.values()):
            was_isolated = entry is isolated_entry and entry.is_suspect
            if was_isolated and entry.request.request_id in in_flight:
                self.num_progress += 1
                self.num_quarantined += 1
                new_events += self._end(entry, FinishReason.ERROR, RowError(QUARANTINED, self._quarantine_message))
            else:
                entry.num_strikes = entry.num_strikes + 1 if entry.request.request_id in in_flight else _strikes(entry)
        return new_events + self.hold_all()

    def hold_all(self) -> list[RequestEvent]:
        """Hold all requests of a worker that has ended; none gets a strike. Returns the resulting events."""
        new_events: list[RequestEvent] = []
        self._isolated = None
        for entry in list(self.entries.values()):
            was_in_queue = entry.is_queued and entry.epoch is not None
            self._hold(entry)
            if entry.is_cancelled or entry.is_answered:
                new_events += self._end(entry, FinishReason.CANCELLED)
            elif was_in_queue:
                new_events.append(Replayed(entry.request.request_id))
        return new_events

    def expire(self, now_s: float) -> list[RequestEvent]:
        """End held requests whose deadline has passed; the worker does so for assigned requests."""
        overdue_entries = [
            entry
            for entry in self.entries.values()
            if entry.epoch is None and entry.request.deadline_s is not None and entry.request.deadline_s <= now_s
        ]
        return [event for entry in overdue_entries for event in self._end(entry, FinishReason.DEADLINE)]

    def _end(self, entry: LedgerEntry, reason: FinishReason, error: RowError | None = None) -> list[RequestEvent]:
        """End a request that no worker will end; return its last events."""
        request_id = entry.request.request_id
        code, message = error or (None, None)
        events: list[RequestEvent] = [
            SequenceFinished(request_id, index, reason, len(tokens), message, code=code)
            for index, tokens in entry.tokens.items()
            if index not in entry.ends
        ]
        self._drop(entry)
        return [*events, self._finished(entry)]

    @staticmethod
    def _finished(entry: LedgerEntry) -> Finished:
        """Return the last event of a request, with totals over all its workers."""
        num_at_admission = 0 if entry.admitted is None else entry.admitted.num_cached_tokens
        num_cached = num_at_admission if entry.num_cached_tokens is None else entry.num_cached_tokens
        num_output = sum(len(tokens) for tokens in entry.tokens.values())
        return Finished(entry.request.request_id, len(entry.request.prompt), num_cached, num_output)

    def _hold(self, entry: LedgerEntry) -> None:
        self._end_assignment(entry)
        entry.dropped_indexes.clear()
        self._held_entries[entry.request.request_id] = entry

    def _end_assignment(self, entry: LedgerEntry) -> None:
        if entry.epoch is not None:
            del self._by_epoch[entry.epoch]
            entry.epoch = None

    def _drop(self, entry: LedgerEntry) -> None:
        self._end_assignment(entry)
        del self.entries[entry.request.request_id]
        self.num_open_of[entry.request.tenant] -= 1
        if not self.num_open_of[entry.request.tenant]:
            del self.num_open_of[entry.request.tenant]
        self._held_entries.pop(entry.request.request_id, None)
        if self._isolated is entry:
            self._isolated = None


def _strikes(entry: LedgerEntry) -> int:
    """Return the strikes of a request that was not in flight: a suspect that was held keeps them, others have 0."""
    return entry.num_strikes if entry.is_suspect and entry.epoch is None else 0


def _unexpected_event(event: Replayed) -> MessageError:
    """Only the ledger makes `Replayed`. By its parameter's type, mypy reports other events that `_take` omits."""
    return MessageError(f"{event.request_id}: unexpected event Replayed", code="unexpected_event")
