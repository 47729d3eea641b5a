"""Writes an engine's commands and steps to a trace file, line by line (`trace_records`).

An error while recording ends the trace, never the engine. Commands and plans are recorded before the engine acts on
them, so that the trace of a crashed worker contains the line that led to the crash.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from quire.core.events import Refused, RequestEvent
from quire.core.request import Request
from quire.core.step import RowResult, StepPlan, StepResult
from quire.engine.trace_records import (
    AnyTraceRecord,
    Cancelled,
    Cleared,
    EventsRecord,
    ExplainedRecord,
    PermutedTokenIds,
    Planned,
    PlanRows,
    RequestRefused,
    Restored,
    Returned,
    StepAborted,
    Submitted,
    TokenIdMapping,
    TracedOutcome,
    TracedSampling,
    TraceHeader,
    event_fields,
)
from quire.observe.trace_file import TraceFile

ROW_FAILED_MESSAGE = "the row failed"
"""Replaces all error messages in a trace with permuted tokens, because a real message may quote tokens or a grammar."""
_UNCHANGED_FIELDS = {*Request.__struct_fields__} & {*Submitted.__struct_fields__} - {"prompt", "continuations"}
"""Request fields that a trace contains unchanged, because they contain no tokens."""


class TraceSettings(msgspec.Struct, frozen=True):
    """Destination of a worker's trace. Sent to the worker in the first message."""

    path: str
    max_bytes: int
    key: bytes
    """Key of the permutation of token ids: the same for all workers of a trace; not written to the file."""
    has_real_token_ids: bool = msgspec.field(default=False, name="has_own_tokens")
    quire: str = ""
    """The version of quire that writes the trace."""


class TraceRecorder:
    """Records one session: a worker from its start to its end."""

    def __init__(self, file: TraceFile, header: TraceHeader, map_ids: TokenIdMapping) -> None:
        self._file = file
        self._map_ids = map_ids
        self._encode = msgspec.json.Encoder().encode
        self._rows = PlanRows()
        self._plan: StepPlan | None = None
        self._has_real_token_ids = header.has_real_token_ids
        self._record(lambda: header)

    def record_request(self, request: Request, *, is_restored: bool) -> None:
        """Record a request just before the scheduler receives it."""
        self._record(lambda: self._request_record(request, is_restored=is_restored))

    def record_refusal(self, event: Refused) -> None:
        """Record that the scheduler refused the last request."""
        self._record(lambda: RequestRefused(request_id=event.request_id, kind=event.kind))

    def record_cancellation(self, request_id: str, index: int | None) -> None:
        """Record a cancellation."""
        self._record(lambda: Cancelled(request_id=request_id, index=index))

    def record_clear(self) -> None:
        """Record that all unused cached blocks are about to be dropped."""
        self._record(Cleared)

    def record_explain(self, now_s: float) -> None:
        """Record an explain request, because it sets the time of the KV memory."""
        self._record(lambda: ExplainedRecord(at_s=now_s))

    def record_plan(self, plan: StepPlan, now_s: float) -> None:
        """Record the plan that the scheduler returned for this time."""
        self._record(lambda: self._plan_record(plan, now_s))

    def record_result(self, result: StepResult, now_s: float) -> None:
        """Record a step's result just before the scheduler receives it."""
        self._record(lambda: self._result_record(result, now_s))

    def record_events(self, events: Sequence[RequestEvent]) -> None:
        """Record the events that the engine returns."""
        self._record(lambda: EventsRecord(events=fields) if (fields := event_fields(events)) else None)

    def record_abort(self) -> None:
        """Record that the step was aborted and sequences with recurrent state are preempted."""
        self._record(StepAborted)

    def close(self) -> None:
        """Write buffered lines and close the file."""
        self._file.close()

    # -- lines ---------------------------------------------------------------------------------------------------------

    def _record(self, make: Callable[[], AnyTraceRecord | None]) -> None:
        if self._file.end_reason is None:
            try:
                if (record := make()) is not None:
                    self._file.put(self._encode(record) + b"\n")
            except Exception as error:
                self._file.end(f"could not write a line: {type(error).__name__}")

    def _request_record(self, request: Request, *, is_restored: bool) -> Submitted | Restored:
        params, map_ids = request.params, self._map_ids
        sampling = TracedSampling(
            params.max_tokens,
            params.min_tokens,
            tuple(sorted(map_ids(params.stop_token_ids))),
            params.prompt_logprobs,
            params.logprobs,
            params.temperature,
        )
        record_type = Restored if is_restored else Submitted
        return record_type(
            prompt=tuple(map_ids(request.prompt)),
            sampling=sampling,
            continuations=tuple(
                msgspec.structs.replace(part, produced=tuple(map_ids(part.produced))) for part in request.continuations
            ),
            has_grammar=request.grammar is not None,
            **{name: getattr(request, name) for name in _UNCHANGED_FIELDS},
        )

    def _plan_record(self, plan: StepPlan, now_s: float) -> Planned:
        drafts = {item.sequence_id: tuple(self._map_ids(item.drafts)) for item in plan.items if item.num_drafts}
        rows = self._rows.to_rows(plan, drafts)
        self._plan = plan
        return Planned(
            step=plan.step,
            at_s=now_s,
            rows=rows,
            copies=plan.copies,
            slot_copies=plan.slot_copies,
            keeps=plan.cache_copies,
            waiting_ids=plan.waiting_ids,
        )

    def _result_record(self, result: StepResult, now_s: float) -> Returned:
        plan, rows = self._plan, result.rows
        outcomes = () if plan is None else tuple(self._outcome(rows.get(item.sequence_id)) for item in plan.items)
        return Returned(step=result.step, at_s=now_s, outcomes=outcomes)

    def _outcome(self, row: RowResult | None) -> tuple[int, ...] | TracedOutcome | None:
        if row is None:
            return None
        if row.error is None and not row.forced and not row.scores and not row.work_tokens:
            return tuple(self._map_ids(row.token_ids))
        tokens, forced = tuple(self._map_ids(row.token_ids)), tuple(self._map_ids(row.forced))
        code, error = row.error or (None, None)
        if error is not None and not self._has_real_token_ids:
            error = ROW_FAILED_MESSAGE
        return TracedOutcome(tokens, forced, len(row.scores), error, row.work_tokens, code)


class NoTrace(TraceRecorder):
    """A recorder that records nothing."""

    def __init__(self) -> None:
        pass

    def _record(self, make: Callable[[], AnyTraceRecord | None]) -> None:
        pass

    def close(self) -> None:
        """Do nothing, because there is no file."""


def open_recorder(settings: TraceSettings, header: TraceHeader) -> TraceRecorder:
    """Begin a session in the trace file. Raises ConfigError if it is missing or not private to this user."""
    ids: TokenIdMapping = list if header.has_real_token_ids else PermutedTokenIds(header.vocabulary_size, settings.key)
    return TraceRecorder(TraceFile(Path(settings.path), settings.max_bytes), header, ids)
