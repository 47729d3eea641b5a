"""Writes down what an engine is told and does, as lines of a trace. Between the engine and the file; decides nothing.

Whatever goes wrong here ends the trace and never the engine. Each line is handed on before what it tells of is done, so
that the line of what ends a worker is there.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from time import time
from typing import ParamSpec

import msgspec

from quire.core.events import Refused, RequestEvent
from quire.core.memory.kv_config import KVMemoryConfig
from quire.core.request import Request
from quire.core.scheduling.scheduler_config import SchedulerConfig
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
    own_names,
)
from quire.observe.trace_file import TraceFile

FAILED = "the row failed"
"""The message of any error in a trace with permuted tokens: the true one may quote tokens, or a grammar."""
Arguments = ParamSpec("Arguments")


class TraceSettings(msgspec.Struct, frozen=True):
    """Where a worker writes its trace. Crosses to the worker with the first message."""

    path: str
    max_bytes: int
    key: bytes
    """Of the permutation of token ids: the same for all lives, and nowhere in the file."""
    has_own_tokens: bool = False
    quire: str = ""
    """The version that writes."""


class TracedEngine(msgspec.Struct, frozen=True):
    """What the header says of an engine."""

    quire: str
    model: str
    vocabulary_size: int
    has_grammars: bool
    guesses: bool
    memory: KVMemoryConfig
    scheduler: SchedulerConfig


class TraceRecorder:
    """One life of an engine, line by line."""

    def __init__(self, file: TraceFile, engine: TracedEngine, names: TraceTokenNames, started_unix_s: float) -> None:
        self._file = file
        self._names = names
        self._encode = msgspec.json.Encoder().encode
        self._rows = PlanRows()
        self._plan: StepPlan | None = None
        self._has_own_tokens = names is own_names
        self._guarded(
            self._put,
            TraceHeader(
                started_unix_s=started_unix_s,
                has_own_tokens=self._has_own_tokens,
                **{name: getattr(engine, name) for name in engine.__struct_fields__},
            ),
        )

    def entering(self, request: Request, *, is_restored: bool) -> None:
        """The scheduler is about to get this."""
        self._guarded(self._entering, request, is_restored)

    def refused(self, answer: Refused) -> None:
        """And did not let it in."""
        self._guarded(self._put, TurnedAway(request_id=answer.request_id, kind=answer.kind))

    def cancelling(self, request_id: str, index: int | None) -> None:
        """This is to end."""
        self._guarded(self._put, Cancelled(request_id=request_id, index=index))

    def clearing(self) -> None:
        """Every cached block is to be forgotten."""
        self._guarded(self._put, Cleared())

    def asking(self, now_s: float) -> None:
        """The memory gets the time because of an explain request."""
        self._guarded(self._put, ExplainedRecord(at_s=now_s))

    def planned(self, plan: StepPlan, now_s: float) -> None:
        """The scheduler got the time and returned this plan."""
        self._guarded(self._planned, plan, now_s)

    def returned(self, result: StepResult, now_s: float) -> None:
        """The scheduler is about to get this."""
        self._guarded(self._returned, result, now_s)

    def record_events(self, events: Sequence[RequestEvent]) -> None:
        """Events that leave the engine."""
        self._guarded(self._record_events, events)

    def giving_up(self) -> None:
        """What runs is to begin again from a kept state."""
        self._guarded(self._put, GaveUp())

    def close(self) -> None:
        """Write what is left."""
        self._file.close()

    # -- lines ---------------------------------------------------------------------------------------------------------

    def _guarded(self, write: Callable[Arguments, None], *args: Arguments.args, **kwargs: Arguments.kwargs) -> None:
        if self._file.why_ended is None:
            try:
                write(*args, **kwargs)
            except Exception as error:
                self._file.end(f"could not write a line: {type(error).__name__}")

    def _put(self, record: AnyTraceRecord) -> None:
        self._file.put(self._encode(record) + b"\n")

    def _entering(self, request: Request, is_restored: bool) -> None:
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
        record = kind(
            request_id=request.request_id,
            prompt=tuple(names(request.prompt)),
            namespace=request.namespace,
            arrival_s=request.arrival_s,
            sampling=sampling,
            tenant=request.tenant,
            priority=request.priority,
            continuations=tuple(
                msgspec.structs.replace(one, produced=tuple(names(one.produced))) for one in request.continuations
            ),
            deadline_s=request.deadline_s,
            is_explained=request.is_explained,
            has_reservation=request.has_reservation,
            epoch=request.epoch,
            has_grammar=request.grammar is not None,
            has_stop_texts=request.has_stop_texts,
            work_tokens=request.work_tokens,
        )
        self._put(record)

    def _planned(self, plan: StepPlan, now_s: float) -> None:
        drafts = {item.sequence_id: tuple(self._names(item.drafts)) for item in plan.items if item.num_drafts}
        rows = self._rows.of(plan, drafts)
        self._plan = plan
        self._put(
            Planned(
                step=plan.step,
                at_s=now_s,
                rows=rows,
                copies=plan.copies,
                slot_copies=plan.slot_copies,
                keeps=plan.keeps,
                held=plan.held,
            )
        )

    def _returned(self, result: StepResult, now_s: float) -> None:
        plan, rows = self._plan, result.rows
        outcomes = () if plan is None else tuple(self._outcome(rows.get(item.sequence_id)) for item in plan.items)
        self._put(Returned(step=result.step, at_s=now_s, outcomes=outcomes))

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

    def _record_events(self, events: Sequence[RequestEvent]) -> None:
        if found := event_fields(events):
            self._put(EventsRecord(events=found))


class NoTrace(TraceRecorder):
    """Records nothing."""

    def __init__(self) -> None:
        pass

    def _guarded(self, write: Callable[Arguments, None], *args: Arguments.args, **kwargs: Arguments.kwargs) -> None:
        pass

    def close(self) -> None:
        """There is no file."""


def open_recorder(settings: TraceSettings, engine: TracedEngine) -> TraceRecorder:
    """Begin a life in the file. Raises ConfigError if that is not there, or not ours."""
    names = own_names if settings.has_own_tokens else PermutedNames(engine.vocabulary_size, settings.key)
    return TraceRecorder(TraceFile(Path(settings.path), settings.max_bytes), engine, names, time())
