"""The open requests of clients, so that a worker may die. Pure: no process, no socket, no clock.

    held ──► assigned ──► sent its last event
      ▲         │
      └─ crash ─┘         assigned again as prompt + tokens; the client sees the next token and nothing of this

A new worker has no record of what the client has received. So the ledger keeps it (tokens, ends, cached tokens at the
first admission, prompt log-probabilities), requests the rest only, and passes on only what is new. A request that
begins here with tokens produced elsewhere is no different from one whose worker has died.

**Epochs.** Every assignment of a request to a worker has a number of its own, larger than all before it, and every
event names the assignment it is of. When an assignment is over, by its last event, by a crash or because the request
was taken back, later events of it are dropped (`take`): however late they come, and however often.

**Suspects.** A worker names a step's requests before it runs them. A request in flight at two consecutive crashes, with
no token between, is a suspect. Suspects run alone, one after the other, until each has a token or its end; one that is
in flight alone when the worker dies is ended with an error of its own. All others wait meanwhile.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

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
from quire.core.request import FinishReason, Request
from quire.core.step import RowError
from quire.engine.commands import Cancel, Restore, Submit
from quire.errors import MessageError, QuireError
from quire.worker.parent.ledger_entry import LedgerEntry

QUARANTINED = "request_quarantined"
POISON = "this request crashed the worker repeatedly, at last while it ran alone, and was quarantined"


class Ledger:
    """The requests of one model, from submission to their last event."""

    def __init__(self, vocabulary_size: int = 1 << 31, poison: str = POISON) -> None:
        self._poison = poison
        """The error of a quarantined request."""
        self.entries: dict[str, LedgerEntry] = {}
        self.num_open_of: Counter[str] = Counter()
        self.vocabulary_size = vocabulary_size
        """Of the worker, once it is ready."""
        self.num_progress = 0
        """Tokens that came, requests that a worker ended or refused, and poison found: a worker with none of these made
        no progress."""
        self.num_quarantined = 0
        """Times a request was alone when its worker died of it."""
        self._held: dict[str, LedgerEntry] = {}
        """Requests that the worker does not have, suspects among them."""
        self._assigned: dict[int, LedgerEntry] = {}
        """Requests that it has, by their epochs."""
        self._last_epoch = 0
        self._alone: LedgerEntry | None = None
        """The suspect that runs now."""

    def add(self, request: Request) -> None:
        """A client's request, perhaps the rest of one begun elsewhere. Ids are the server's own and never repeat."""
        entry = LedgerEntry(request, tokens={one.index: [*one.produced] for one in request.continuations})
        if request.has_begun:
            entry.num_prompt_logprobs = len(request.prompt) - 1  # sent before the first token
        self.entries[request.request_id] = self._held[request.request_id] = entry
        self.num_open_of[request.tenant] += 1

    def names_sent(self) -> tuple[str, ...]:
        """Requests that the worker has."""
        return tuple(entry.request.request_id for entry in self._assigned.values())

    def abandon(self, error: QuireError) -> list[RequestEvent]:
        """Refuse requests that are not admitted: there will be no worker any more. Open streams are not ended here."""
        entries, self.entries, self._held, self._assigned = self.entries, {}, {}, {}
        self.num_open_of.clear()
        return [Refused.of(request_id, error) for request_id, entry in entries.items() if not entry.is_queued]

    # -- to the worker -------------------------------------------------------------------------------------------------

    def due(self, now_s: float) -> list[Submit | Restore | Cancel]:
        """The commands for the worker now, in this order."""
        if self._alone is not None and self._alone.is_suspect:
            return []
        # A request that ran alone did no harm, and is taken back where another suspect waits.
        self._alone = next((entry for entry in self._held.values() if entry.is_suspect), None)
        if self._alone is None:
            return [self._assign(entry, now_s) for entry in list(self._held.values())]
        return [*self._take_back(), self._assign(self._alone, now_s)]

    def _take_back(self) -> list[Cancel]:
        """All that the worker would continue: it ends them before it receives anything else."""
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
        """The client has gone: commands for the worker, and events for the client's side if the worker has none."""
        entry = self.entries.get(request_id)
        if entry is None or entry.is_cancelled:
            return [], []
        entry.is_cancelled = True
        if entry.epoch is None:
            return [], self._end(entry, FinishReason.CANCELLED)
        return [Cancel(request_id)], []

    def cancel_answer(self, request_id: str, index: int) -> tuple[list[Cancel], list[RequestEvent]]:
        """The client needs no more of one answer. It ends here and now, so that no worker gets it again."""
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
        """Add to `new_events` what is new to the clients in a worker's events. Raises MessageError for invalid ones.

        Events added before that are recorded here and must be sent all the same.
        """
        for event in events:
            entry = self._assigned.get(event.epoch)
            if entry is None and 0 < event.epoch <= self._last_epoch:
                continue  # of an assignment that is over
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
        """It was not admitted. If its client has output already, the refusal is its end."""
        error = event.error
        self.num_progress += 1
        if entry.has_sent_output:
            return self._end(entry, FinishReason.ERROR, RowError(error.code, str(error)))
        self._drop(entry)
        return [event]

    def _take_once(self, entry: LedgerEntry, event: Queued | Admitted | FirstToken) -> list[RequestEvent]:
        """How far it is. A new worker reports it again; the client has received it."""
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
        """What a dead worker had cached counts, though its successor had to compute it."""
        if not 0 <= num_cached_tokens <= len(entry.request.prompt):
            raise MessageError(f"{num_cached_tokens} of {len(entry.request.prompt)} prompt tokens reported as cached")
        return max(num_cached_tokens, 0 if entry.admitted is None else entry.admitted.num_cached_tokens)

    def _take_prompt_logprobs(self, entry: LedgerEntry, event: PromptLogprobs) -> list[RequestEvent]:
        """A new worker reports from the first token on; the client has had some of them."""
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
        """The worker is gone: all it had is held again. Returns the ends that follow from that."""
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
        """The worker is gone, and no request is to blame: all it had is held until there is another."""
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
        """End requests that are held beyond their deadline; the worker ends the others."""
        late = [
            entry
            for entry in self.entries.values()
            if entry.epoch is None and entry.request.deadline_s is not None and entry.request.deadline_s <= now_s
        ]
        return [event for entry in late for event in self._end(entry, FinishReason.DEADLINE)]

    def _end(self, entry: LedgerEntry, reason: FinishReason, error: RowError | None = None) -> list[RequestEvent]:
        """The last events of a request no worker will end."""
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
        """Counted over all workers it ran on."""
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
    """A suspect that has not run since stays one; all others start anew."""
    return entry.num_strikes if entry.is_suspect and entry.epoch is None else 0


def _unexpected(event: Replayed) -> MessageError:
    """Only the ledger makes such events. A kind that is not handled above is a type error here."""
    return MessageError(f"{event.request_id}: unexpected event Replayed", code="unexpected_event")
