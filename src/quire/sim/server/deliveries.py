"""Checks that each simulated client receives exactly the events and tokens that it should."""

from collections import Counter
from dataclasses import dataclass, field

from msgspec.structs import replace

from quire.backends.oracle import answer_alone
from quire.core.events import Admitted, Finished, Preempted, PromptLogprobs, RequestEvent, SequenceFinished, Token
from quire.core.request import Continuation, FinishReason, Request


@dataclass(slots=True)
class DeliveryRecord:
    """One request, from its client's side."""

    request: Request
    tokens: dict[int, list[int]] = field(default_factory=dict)
    reasons: dict[int, FinishReason] = field(default_factory=dict)
    num_prompt_logprobs: int = 0
    next_prompt_position: int = 1
    """Expected first position of the worker's next prompt log-probabilities; a new worker starts over."""
    first_wait_s: float | None = None
    num_preemptions: int = 0
    is_cancelled: bool = False
    dropped: set[int] = field(default_factory=set)
    """Continuations that were cancelled individually before they ended."""
    num_spoiled_rows: int = 0
    finished: Finished | None = None


class Deliveries:
    """Collects events, and describes violations in `complaints`."""

    def __init__(self, vocabulary_size: int, *, has_state: bool = False) -> None:
        self.entries: dict[str, DeliveryRecord] = {}
        self.open: dict[str, DeliveryRecord] = {}
        """Requests that have not received their last event."""
        self.complaints: list[str] = []
        self.planned_s = 0.0
        """Plan time of the step whose events are processed; deadlines are decided at this time."""
        self._vocabulary_size = vocabulary_size
        self._has_state = has_state

    def add(self, request: Request) -> None:
        """Add a request that the server has accepted."""
        entry = DeliveryRecord(request, {one.index: [] for one in request.continuations})
        self.entries[request.request_id] = self.open[request.request_id] = entry

    def take(self, event: RequestEvent) -> None:
        """Check and record one event."""
        entry = self.open.get(event.request_id)
        if entry is None:
            self.complaints.append(f"{event.request_id}: {type(event).__name__} after the end")
        elif isinstance(event, Token):
            self._take_token(entry, event)
        elif isinstance(event, SequenceFinished):
            if event.sequence_index in entry.reasons:
                self.complaints.append(f"{event.request_id}: continuation {event.sequence_index} ended twice")
            entry.reasons[event.sequence_index] = event.reason
        elif isinstance(event, Finished):
            entry.finished = event
            del self.open[event.request_id]
            self._settle(entry)
        elif isinstance(event, Preempted):
            entry.num_preemptions += 1
        elif isinstance(event, Admitted):
            if entry.first_wait_s is None:
                entry.first_wait_s = event.wait_s
        elif isinstance(event, PromptLogprobs):
            self._take_prompt_logprobs(entry, event)

    def cancelled(self, request_id: str) -> None:
        """Record that the client disconnected: the request must end now, and may end as cancelled."""
        if request_id in self.open:
            self.open[request_id].is_cancelled = True

    def dropped(self, request_id: str, index: int) -> None:
        """Record that one continuation was cancelled: it must end now, without effect on the others."""
        entry = self.open.get(request_id)
        if entry is not None and index in entry.tokens and index not in entry.reasons:
            entry.dropped.add(index)

    def cancels(self) -> list[tuple[str, int | None]]:
        """Return the open cancelled requests and continuations; a new worker needs these cancellations again."""
        return [
            *((name, None) for name, entry in self.open.items() if entry.is_cancelled),
            *((name, index) for name, entry in self.open.items() for index in sorted(entry.dropped)),
        ]

    def spoiled(self, request_id: str) -> None:
        """Record that a row of the request failed: this request, and no other, may end with an error."""
        self.open[request_id].num_spoiled_rows += 1

    def unfinished(self) -> list[Request]:
        """Return the requests to restore after a crash: each prompt, with the tokens of each open continuation."""
        again = []
        for entry in self.open.values():
            request = entry.request
            left = tuple(
                Continuation(one.index, tuple(entry.tokens[one.index]))
                for one in request.continuations
                if one.index not in entry.reasons
            )
            entry.next_prompt_position = 1
            # A request with output must not be rejected, even if its open continuations have no tokens.
            has_begun = bool(entry.reasons) or any(entry.tokens.values())
            again.append(replace(request, continuations=left, has_reservation=request.has_reservation or has_begun))
        return again

    def _take_token(self, entry: DeliveryRecord, event: Token) -> None:
        tokens = entry.tokens[event.sequence_index]
        if entry.first_wait_s is None:
            self.complaints.append(f"{event.request_id}: a token before it was admitted")
        if entry.is_cancelled or event.sequence_index in entry.dropped:
            self.complaints.append(f"{event.request_id}: a token after it was cancelled")
        tokens.append(event.token_id)
        if event.num_output_tokens != len(tokens):
            self.complaints.append(
                f"{event.request_id}: expected token {len(tokens)}, got token {event.num_output_tokens}"
            )
        if event.sequence_index in entry.reasons:
            self.complaints.append(f"{event.request_id}: a token after continuation {event.sequence_index} ended")
        if (event.logprobs is None) != (entry.request.params.logprobs is None):
            self.complaints.append(f"{event.request_id}: logprobs missing or not requested")

    def _take_prompt_logprobs(self, entry: DeliveryRecord, event: PromptLogprobs) -> None:
        if event.first_position != entry.next_prompt_position:
            self.complaints.append(f"{event.request_id}: prompt logprobs from {event.first_position} are out of order")
        entry.next_prompt_position += len(event.logprobs)
        entry.num_prompt_logprobs = max(entry.num_prompt_logprobs, entry.next_prompt_position - 1)

    def _settle(self, entry: DeliveryRecord) -> None:
        """Check the tokens: equal to those of the request run alone, or a prefix of them if the request was cut off."""
        request = entry.request
        if set(entry.reasons) != set(entry.tokens):
            self.complaints.append(f"{request.request_id}: ended with continuations {sorted(entry.reasons)} only")
        is_whole = False
        for index, reason in entry.reasons.items():
            alone = answer_alone(
                request.prompt, request.params, request.seed, self._vocabulary_size, index, has_state=self._has_state
            )
            got = entry.tokens[index]
            is_cut = reason not in (FinishReason.STOP, FinishReason.LENGTH)
            is_whole = is_whole or not is_cut
            if got != (alone[: len(got)] if is_cut else alone):
                self.complaints.append(f"{request.request_id}: continuation {index} got {got}, alone it gets {alone}")
            stops = bool(got) and got[-1] in request.params.stop_token_ids and len(got) > request.params.min_tokens
            if not is_cut and (reason is FinishReason.STOP) != stops:
                self.complaints.append(f"{request.request_id}: continuation {index} ended by {reason.value}")
        self._settle_reasons(entry)
        self._settle_usage(entry)
        wanted = len(request.prompt) - 1 if request.params.prompt_logprobs is not None else 0
        if is_whole and entry.num_prompt_logprobs != wanted:
            self.complaints.append(f"{request.request_id}: {entry.num_prompt_logprobs} prompt logprobs, not {wanted}")

    def _settle_reasons(self, entry: DeliveryRecord) -> None:
        """Check that every finish reason has a cause."""
        reasons, deadline_s = Counter(entry.reasons.values()), entry.request.deadline_s
        name = entry.request.request_id
        cancelled = {index for index, reason in entry.reasons.items() if reason is FinishReason.CANCELLED}
        if cancelled - entry.dropped and not entry.is_cancelled:
            self.complaints.append(f"{name}: ended as cancelled without a cancellation")
        # In the step of the cancellation other reasons are possible, but not a complete output.
        if entry.is_cancelled and set(reasons) <= {FinishReason.STOP, FinishReason.LENGTH}:
            self.complaints.append(f"{name}: cancelled, and ended by {sorted(reason.value for reason in reasons)}")
        ended = {index for index, reason in entry.reasons.items() if reason in (FinishReason.STOP, FinishReason.LENGTH)}
        if ended & entry.dropped:
            self.complaints.append(f"{name}: continuations {sorted(ended & entry.dropped)} were cancelled and went on")
        if reasons[FinishReason.DEADLINE] and (deadline_s is None or self.planned_s < deadline_s):
            self.complaints.append(f"{name}: ended by its deadline {deadline_s} at {self.planned_s}")
        others = {index for index, reason in entry.reasons.items() if reason is not FinishReason.DISPLACED}
        if reasons[FinishReason.DISPLACED] and (others - entry.dropped or any(entry.tokens.values())):
            self.complaints.append(f"{name}: displaced in the middle of an answer")
        if reasons[FinishReason.ERROR] and not entry.num_spoiled_rows:
            self.complaints.append(f"{name}: ended in an error, and none of its rows failed")

    def _settle_usage(self, entry: DeliveryRecord) -> None:
        finished, request = entry.finished, entry.request
        if finished is None:
            return
        num_output = sum(len(tokens) for tokens in entry.tokens.values())
        is_sound = (
            finished.num_prompt_tokens == len(request.prompt)
            and finished.num_output_tokens <= num_output
            and 0 <= finished.num_cached_tokens <= len(request.prompt)
        )
        if not is_sound:
            self.complaints.append(f"{request.request_id}: {finished} for {num_output} tokens of output")
