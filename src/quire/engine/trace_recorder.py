"""Writes an engine's commands and steps to a trace file, line by line. Stands between engine and file; decides nothing.

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
    GaveUp,
    PermutedNames,
    Planned,
    PlanRows,
    Restored,
    Returned,
    Submitted,
    TracedOutcome,
    TracedSampling,
    TraceHeader,
    TraceTokenNames,
    TurnedAway,
    event_fields,
)
from quire.observe.trace_file import TraceFile

FAILED = "the row failed"
"""Replaces all error messages in a trace with permuted tokens, because a real message may quote tokens or a grammar."""
_SAME_FIELDS = {*Request.__struct_fields__} & {*Submitted.__struct_fields__} - {"prompt", "continuations"}
"""Request fields that a trace contains unchanged, because they contain no tokens."""


class TraceSettings(msgspec.Struct, frozen=True):
    """Destination of a worker's trace. Sent to the worker in the first message."""

    path: str
    max_bytes: int
    key: bytes
    """Key of the permutation of token ids: equal for all workers of a trace, and not part of the file."""
    has_own_tokens: bool = False
    quire: str = ""
    """The version of quire that writes the trace."""


class TraceRecorder:
    """Records one session, from a worker's start to its end."""

    def __init__(self, file: TraceFile, header: TraceHeader, names: TraceTokenNames) -> None:
        self._file = file
        self._names = names
        self._encode = msgspec.json.Encoder().encode
        self._rows = PlanRows()
        self._plan: StepPlan | None = None
        self._has_own_tokens = header.has_own_tokens
        self._record(lambda: header)

    def entering(self, request: Request, *, is_restored: bool) -> None:
        """Record a request just before the scheduler receives it."""
        self._record(lambda: self._entered(request, is_restored=is_restored))

    def refused(self, answer: Refused) -> None:
        """Record that the scheduler refused the last request."""
        self._record(lambda: TurnedAway(request_id=answer.request_id, kind=answer.kind))

    def cancelling(self, request_id: str, index: int | None) -> None:
        """Record a cancellation."""
        self._record(lambda: Cancelled(request_id=request_id, index=index))

    def clearing(self) -> None:
        """Record that all unused cached blocks are about to be dropped."""
        self._record(Cleared)

    def asking(self, now_s: float) -> None:
        """Record an explain request, which passes its time to the memory."""
        self._record(lambda: ExplainedRecord(at_s=now_s))

    def planned(self, plan: StepPlan, now_s: float) -> None:
        """Record the plan that the scheduler returned for this time."""
        self._record(lambda: self._planned(plan, now_s))

    def returned(self, result: StepResult, now_s: float) -> None:
        """Record a step's result just before the scheduler receives it."""
        self._record(lambda: self._returned(result, now_s))

    def record_events(self, events: Sequence[RequestEvent]) -> None:
        """Record the events that the engine returns."""
        self._record(lambda: EventsRecord(events=found) if (found := event_fields(events)) else None)

    def giving_up(self) -> None:
        """Record that sequences with recurrent state restart from a saved state."""
        self._record(GaveUp)

    def close(self) -> None:
        """Write buffered lines and close the file."""
        self._file.close()

    # -- lines ---------------------------------------------------------------------------------------------------------

    def _record(self, make: Callable[[], AnyTraceRecord | None]) -> None:
        if self._file.why_ended is None:
            try:
                if (record := make()) is not None:
                    self._file.put(self._encode(record) + b"\n")
            except Exception as error:
                self._file.end(f"could not write a line: {type(error).__name__}")

    def _entered(self, request: Request, *, is_restored: bool) -> Submitted | Restored:
        params, names = request.params, self._names
        sampling = TracedSampling(
            params.max_tokens,
            params.min_tokens,
            tuple(sorted(names(params.stop_token_ids))),
            params.prompt_logprobs,
            params.logprobs,
            params.temperature,
        )
        kind = Restored if is_restored else Submitted
        return kind(
            prompt=tuple(names(request.prompt)),
            sampling=sampling,
            continuations=tuple(
                msgspec.structs.replace(one, produced=tuple(names(one.produced))) for one in request.continuations
            ),
            has_grammar=request.grammar is not None,
            **{name: getattr(request, name) for name in _SAME_FIELDS},
        )

    def _planned(self, plan: StepPlan, now_s: float) -> Planned:
        drafts = {item.sequence_id: tuple(self._names(item.drafts)) for item in plan.items if item.num_drafts}
        rows = self._rows.of(plan, drafts)
        self._plan = plan
        return Planned(
            step=plan.step,
            at_s=now_s,
            rows=rows,
            copies=plan.copies,
            slot_copies=plan.slot_copies,
            keeps=plan.keeps,
            held=plan.held,
        )

    def _returned(self, result: StepResult, now_s: float) -> Returned:
        plan, rows = self._plan, result.rows
        outcomes = () if plan is None else tuple(self._outcome(rows.get(item.sequence_id)) for item in plan.items)
        return Returned(step=result.step, at_s=now_s, outcomes=outcomes)

    def _outcome(self, row: RowResult | None) -> tuple[int, ...] | TracedOutcome | None:
        if row is None:
            return None
        if row.error is None and not row.forced and not row.scores and not row.work_tokens:
            return tuple(self._names(row.token_ids))
        tokens, forced = tuple(self._names(row.token_ids)), tuple(self._names(row.forced))
        code, error = row.error or (None, None)
        if error is not None and not self._has_own_tokens:
            error = FAILED
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
    names: TraceTokenNames = list if header.has_own_tokens else PermutedNames(header.vocabulary_size, settings.key)
    return TraceRecorder(TraceFile(Path(settings.path), settings.max_bytes), header, names)
