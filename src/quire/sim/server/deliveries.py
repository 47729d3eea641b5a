"""Checks that each simulated client receives exactly the events and tokens that it should."""

from collections import Counter
from dataclasses import dataclass, field

from msgspec.structs import replace

from quire.backends.oracle import answer_alone
from quire.core.events import Admitted, Finished, Preempted, PromptLogprobs, RequestEvent, SequenceFinished, Token
from quire.core.request import Continuation, FinishReason, Request


@dataclass(slots=True)
class DeliveryRecord:
    """The events and tokens that the client of one request has received."""

    request: Request
    tokens: dict[int, list[int]] = field(default_factory=dict)
    reasons: dict[int, FinishReason] = field(default_factory=dict)
    num_prompt_logprobs: int = 0
    next_prompt_position: int = 1
    """Expected first position of the next prompt log-probabilities; a new worker begins again at 1."""
    first_wait_s: float | None = None
    num_preemptions: int = 0
    is_cancelled: bool = False
    cancelled_indexes: set[int] = field(default_factory=set)
    """Indexes of continuations that were cancelled individually before they ended."""
    num_failed_rows: int = 0
    finished: Finished | None = None


class Deliveries:
    """Records events by request, and describes violations in `violations`."""

    def __init__(self, vocabulary_size: int, *, has_recurrent_state: bool = False) -> None:
        self.entries: dict[str, DeliveryRecord] = {}
        self.open: dict[str, DeliveryRecord] = {}
        """Requests that have not received their last event."""
        self.violations: list[str] = []
        self.planned_s = 0.0
        """Time at which the current step was planned; deadlines are checked against this time."""
        self._vocabulary_size = vocabulary_size
        self._has_state = has_recurrent_state

    def add(self, request: Request) -> None:
        """Add a request that the server has accepted."""
        entry = DeliveryRecord(request, {continuation.index: [] for continuation in request.continuations})
        self.entries[request.request_id] = self.open[request.request_id] = entry

    def take(self, event: RequestEvent) -> None:
        """Check and record one event."""
        entry = self.open.get(event.request_id)
        if entry is None:
            self.violations.append(f"{event.request_id}: {type(event).__name__} after the end")
        elif isinstance(event, Token):
            self._take_token(entry, event)
        elif isinstance(event, SequenceFinished):
            if event.sequence_index in entry.reasons:
                self.violations.append(f"{event.request_id}: continuation {event.sequence_index} ended twice")
            entry.reasons[event.sequence_index] = event.reason
        elif isinstance(event, Finished):
            entry.finished = event
            del self.open[event.request_id]
            self._check_finished(entry)
        elif isinstance(event, Preempted):
            entry.num_preemptions += 1
        elif isinstance(event, Admitted):
            if entry.first_wait_s is None:
                entry.first_wait_s = event.wait_s
        elif isinstance(event, PromptLogprobs):
            self._take_prompt_logprobs(entry, event)

    def record_cancellation(self, request_id: str) -> None:
        """Record that the client cancelled the request: it gets no more tokens, and may end as cancelled."""
        if request_id in self.open:
            self.open[request_id].is_cancelled = True

    def record_continuation_cancellation(self, request_id: str, index: int) -> None:
        """Record that one continuation was cancelled: it gets no more tokens; the others are not affected."""
        entry = self.open.get(request_id)
        if entry is not None and index in entry.tokens and index not in entry.reasons:
            entry.cancelled_indexes.add(index)

    def open_cancellations(self) -> list[tuple[str, int | None]]:
        """Return the ids and indexes of open requests and continuations to cancel again at a new worker."""
        return [
            *((name, None) for name, entry in self.open.items() if entry.is_cancelled),
            *((name, index) for name, entry in self.open.items() for index in sorted(entry.cancelled_indexes)),
        ]

    def record_row_failure(self, request_id: str) -> None:
        """Record that a row of the request failed, so that the request may end with an error."""
        self.open[request_id].num_failed_rows += 1

    def unfinished(self) -> list[Request]:
        """Return the requests to restore after a crash, with the tokens of their open continuations."""
        result = []
        for entry in self.open.values():
            request = entry.request
            active = tuple(
                Continuation(continuation.index, tuple(entry.tokens[continuation.index]))
                for continuation in request.continuations
                if continuation.index not in entry.reasons
            )
            entry.next_prompt_position = 1
            # A request with output must not be rejected, even if its open continuations have no tokens.
            has_begun = bool(entry.reasons) or any(entry.tokens.values())
            result.append(replace(request, continuations=active, has_reservation=request.has_reservation or has_begun))
        return result

    def _take_token(self, entry: DeliveryRecord, event: Token) -> None:
        tokens = entry.tokens[event.sequence_index]
        if entry.first_wait_s is None:
            self.violations.append(f"{event.request_id}: a token before it was admitted")
        if entry.is_cancelled or event.sequence_index in entry.cancelled_indexes:
            self.violations.append(f"{event.request_id}: a token after it was cancelled")
        tokens.append(event.token_id)
        if event.num_output_tokens != len(tokens):
            self.violations.append(
                f"{event.request_id}: expected token {len(tokens)}, got token {event.num_output_tokens}"
            )
        if event.sequence_index in entry.reasons:
            self.violations.append(f"{event.request_id}: a token after continuation {event.sequence_index} ended")
        if (event.logprobs is None) != (entry.request.params.logprobs is None):
            self.violations.append(f"{event.request_id}: logprobs missing or not requested")

    def _take_prompt_logprobs(self, entry: DeliveryRecord, event: PromptLogprobs) -> None:
        if event.first_position != entry.next_prompt_position:
            self.violations.append(f"{event.request_id}: prompt logprobs from {event.first_position} are out of order")
        entry.next_prompt_position += len(event.logprobs)
        entry.num_prompt_logprobs = max(entry.num_prompt_logprobs, entry.next_prompt_position - 1)

    def _check_finished(self, entry: DeliveryRecord) -> None:
        """Check that the tokens equal those of the request run alone, or a prefix of them if it was ended early."""
        request = entry.request
        if set(entry.reasons) != set(entry.tokens):
            self.violations.append(f"{request.request_id}: ended with continuations {sorted(entry.reasons)} only")
        is_complete = False
        for index, reason in entry.reasons.items():
            expected = answer_alone(
                request.prompt, request.params, request.seed, self._vocabulary_size, index, has_state=self._has_state
            )
            ids = entry.tokens[index]
            is_partial = reason not in (FinishReason.STOP, FinishReason.LENGTH)
            is_complete = is_complete or not is_partial
            if ids != (expected[: len(ids)] if is_partial else expected):
                self.violations.append(f"{request.request_id}: continuation {index}: expected {expected}, got {ids}")
            is_stop = bool(ids) and ids[-1] in request.params.stop_token_ids and len(ids) > request.params.min_tokens
            if not is_partial and (reason is FinishReason.STOP) != is_stop:
                self.violations.append(f"{request.request_id}: continuation {index}: bad finish reason {reason.value}")
        self._check_reasons(entry)
        self._check_usage(entry)
        required = len(request.prompt) - 1 if request.params.prompt_logprobs is not None else 0
        if is_complete and entry.num_prompt_logprobs != required:
            self.violations.append(f"{request.request_id}: {entry.num_prompt_logprobs} of {required} prompt logprobs")

    def _check_reasons(self, entry: DeliveryRecord) -> None:
        """Check that every finish reason has a cause, and every cancellation an effect."""
        reasons, deadline_s = Counter(entry.reasons.values()), entry.request.deadline_s
        name = entry.request.request_id
        cancelled = {index for index, reason in entry.reasons.items() if reason is FinishReason.CANCELLED}
        if cancelled - entry.cancelled_indexes and not entry.is_cancelled:
            self.violations.append(f"{name}: ended as cancelled without a cancellation")
        # In the step of the cancellation some continuations may still complete, but not all of them.
        if entry.is_cancelled and set(reasons) <= {FinishReason.STOP, FinishReason.LENGTH}:
            self.violations.append(f"{name}: cancelled, and ended by {sorted(reason.value for reason in reasons)}")
        ended = {index for index, reason in entry.reasons.items() if reason in (FinishReason.STOP, FinishReason.LENGTH)}
        if ended & entry.cancelled_indexes:
            self.violations.append(f"{name}: cancelled continuations {sorted(ended & entry.cancelled_indexes)} went on")
        if reasons[FinishReason.DEADLINE] and (deadline_s is None or self.planned_s < deadline_s):
            self.violations.append(f"{name}: ended by its deadline {deadline_s} at {self.planned_s}")
        not_displaced = {index for index, reason in entry.reasons.items() if reason is not FinishReason.DISPLACED}
        if reasons[FinishReason.DISPLACED] and (not_displaced - entry.cancelled_indexes or any(entry.tokens.values())):
            self.violations.append(f"{name}: displaced after output began")
        if reasons[FinishReason.ERROR] and not entry.num_failed_rows:
            self.violations.append(f"{name}: ended in an error, and none of its rows failed")

    def _check_usage(self, entry: DeliveryRecord) -> None:
        finished, request = entry.finished, entry.request
        if finished is None:
            return
        num_output = sum(len(tokens) for tokens in entry.tokens.values())
        is_valid = (
            finished.num_prompt_tokens == len(request.prompt)
            and finished.num_output_tokens <= num_output
            and 0 <= finished.num_cached_tokens <= len(request.prompt)
        )
        if not is_valid:
            self.violations.append(f"{request.request_id}: expected at most {num_output} output tokens, got {finished}")
