"""Replays a trace through the real scheduler and KV memory, and finds the first difference.

    trace ─► command, time, result ─► Scheduler, KVMemory ─► plan, events ─► compared with those of the trace

The runner's results come from the trace. A scheduler has no clock and no random generator, and uses tokens only in
comparisons for equality. Therefore equal commands at equal times give equal plans, with permuted tokens too. A
difference means that the scheduler has changed, or that a bug makes plans depend on something else.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from quire.core.digests import KEY_BYTES, BlockHasher
from quire.core.events import RequestEvent
from quire.core.memory.kv_memory import KVMemory
from quire.core.request import Request, ResolvedSampling
from quire.core.scheduling.ngrams import make_scheduler
from quire.core.step import ROW_FAILED, RowError, RowResult, StepPlan, StepResult, TokenLogprobs
from quire.engine.trace_records import (
    AnyTraceRecord,
    Cancelled,
    Cleared,
    EventsRecord,
    ExplainedRecord,
    Planned,
    PlannedRow,
    PlanRows,
    RecordingEnded,
    RequestRefused,
    Restored,
    Returned,
    StepAborted,
    Submitted,
    TracedOutcome,
    TraceHeader,
    event_fields,
)
from quire.errors import CapacityError, ReplayError, RequestError
from quire.sim.replay.report import PlanDifference, ReplayReport, RowDifference, SessionReport, TableRow
from quire.sim.replay.trace_lines import TraceLine, trace_lines

OnProgress = Callable[[str, int, int], None]
PROGRESS_EVERY = 256
"""Number of lines between two progress updates."""
PLACEHOLDER_LOGPROB = TokenLogprobs(0, 0.0, 1, ())
"""Placeholder for each prompt log-probability, because only their number matters."""


def replay(path: Path, on_progress: OnProgress = lambda _label, _done, _total: None) -> ReplayReport:
    """Replay all sessions of a trace, each to its end or its first difference. Raises ReplayError if it is invalid."""
    sessions: list[SessionReplay] = []
    for line in trace_lines(path):
        if line.number % PROGRESS_EVERY == 1:
            on_progress("replaying", line.num_bytes_read, path.stat().st_size)
        if isinstance(line.record, TraceHeader):
            sessions.append(SessionReplay(line.number, line.record))
        else:
            sessions[-1].take(line)
    return ReplayReport(str(path), tuple(session.report() for session in sessions))


@dataclass(slots=True)
class _Failure:
    """An exception of the scheduler. It counts as a difference only if the recorded session continued after it."""

    line: int
    text: str


class SessionReplay:
    """Replays one worker's session, from its header on."""

    def __init__(self, line: int, header: TraceHeader) -> None:
        self.header = header
        self.memory = KVMemory(header.memory, BlockHasher(bytes(KEY_BYTES)))
        self.scheduler = make_scheduler(header.scheduler, self.memory, has_drafts=header.has_ngram_drafts)
        self._line = line
        self._row_encoder, self._row_decoder = PlanRows(), PlanRows()
        """Encode the rows of this replay's plans, and decode the rows of the recorded plans."""
        self._plan: StepPlan | None = None
        """The plan whose result has not been read yet."""
        self._expected_record: EventsRecord | RequestRefused | None = None
        """The record that the next line must contain; None: any record except events and rejections."""
        self._failure: _Failure | None = None
        self._difference: PlanDifference | None = None
        self._note = ""
        self._num_requests = self._num_steps = 0

    def report(self) -> SessionReport:
        """Return the result of this session."""
        note = self._note
        if not note and self._failure is not None:
            note = f"the worker failed, and so does the replay: {self._failure.text}"
        elif not note and self._plan is not None and self._difference is None:
            note = f"step {self._plan.step} has no result: the worker ended during this step"
        header = self.header
        return SessionReport(
            self._line, header.quire, header.model, self._num_steps, self._num_requests, note, self._difference
        )

    def take(self, line: TraceLine) -> None:
        """Process one line; ignored after a difference."""
        record = line.record
        if self._difference is not None:
            return
        if record is None:
            self._note = f"cut off within line {line.number}"
        elif isinstance(record, RecordingEnded):
            self._note = f"the trace ended before its worker: {record.why}"
        elif self._failure is not None:
            self._set_difference(line.number, "failure", "the session continued", self._failure.text)
        else:
            self._run(line.number, record)

    def _run(self, number: int, record: AnyTraceRecord) -> None:
        expected, self._expected_record = self._expected_record, None
        if isinstance(record, EventsRecord | RequestRefused):
            if record != expected:
                self._set_difference(number, "events", _record_text(record), _record_text(expected))
            return
        if expected is not None:
            self._set_difference(number, "events", _record_text(None), _record_text(expected))
            return
        try:
            self._execute(number, record)
        except ReplayError:
            raise
        except Exception as error:  # any exception would have ended the recording worker
            self._failure = _Failure(number, f"{type(error).__name__}: {error}")

    def _execute(self, number: int, record: AnyTraceRecord) -> None:
        match record:
            case Submitted() | Restored():
                self._submit(record)
            case Cancelled(request_id=request_id, index=index):
                self.scheduler.cancel(request_id, index)
            case Cleared():
                self.memory.clear()
            case ExplainedRecord(at_s=now_s):
                self.memory.advance(now_s)
            case Planned():
                self._compare_plan(number, record)
            case Returned():
                self._apply(number, record)
            case StepAborted():
                while self.memory.states is not None and self.scheduler.running:
                    self.scheduler.preempt_latest()

    def _submit(self, record: Submitted | Restored) -> None:
        self._num_requests += 1
        submit = self.scheduler.restore if isinstance(record, Restored) else self.scheduler.submit
        try:
            submit(request_of(record))
        except (RequestError, CapacityError) as error:
            self._expected_record = RequestRefused(request_id=record.request_id, kind=type(error).__name__)

    # -- steps ---------------------------------------------------------------------------------------------------------

    def _compare_plan(self, number: int, record: Planned) -> None:
        plan = self.scheduler.plan(record.at_s, lambda sequence: sequence.sequence_id in record.waiting_ids)
        drafts = {item.sequence_id: item.drafts for item in plan.items if item.num_drafts}
        rows = self._row_encoder.to_rows(plan, drafts)
        tables = self._row_decoder.to_block_tables(record.rows)
        planned = Planned(
            step=plan.step,
            at_s=record.at_s,
            rows=rows,
            copies=plan.copies,
            slot_copies=plan.slot_copies,
            keeps=plan.cache_copies,
            waiting_ids=plan.waiting_ids,
        )
        if planned != record:
            diffs = row_differences(record.rows, rows, tables, self._row_encoder.blocks, self._names())
            texts = [] if diffs else [f"{name} {getattr(p, name)}" for name in PLAN_FIELDS for p in (record, planned)]
            recorded, now = " ".join(texts[::2]), " ".join(texts[1::2])
            self._set_difference(number, "plan", recorded, now, record.step, diffs)
        elif plan.items:
            self._num_steps += 1
            self._plan = plan
        else:
            self._expect_events(self.scheduler.take_events())

    def _apply(self, number: int, record: Returned) -> None:
        plan, self._plan = self._plan, None
        if plan is None or len(record.outcomes) != len(plan.items):
            raise ReplayError(f"line {number} of the trace is damaged: its result does not match the last plan")
        rows = {
            item.sequence_id: _row_of(outcome)
            for item, outcome in zip(plan.items, record.outcomes, strict=True)
            if outcome is not None
        }
        self._expect_events(self.scheduler.apply(StepResult(record.step, rows), record.at_s))

    def _expect_events(self, events: Iterable[RequestEvent]) -> None:
        if fields := event_fields(events):
            self._expected_record = EventsRecord(events=fields)

    def _names(self) -> dict[int, str]:
        return {sequence.sequence_id: name for name, live in self.scheduler.live.items() for sequence in live.sequences}

    def _set_difference(
        self,
        line: int,
        kind: str,
        recorded: str,
        now: str,
        step: int | None = None,
        rows: tuple[RowDifference, ...] = (),
    ) -> None:
        step = self.scheduler.stats.num_steps if step is None else step
        self._difference = PlanDifference(line, step, kind, recorded, now, rows)


PLAN_FIELDS = ("step", "copies", "slot_copies", "keeps", "held")
"""The fields of a plan that are compared in addition to its rows."""


def request_of(record: Submitted | Restored) -> Request:
    """Return the recorded request with all fields that the scheduler uses."""
    sampling = record.sampling
    params = ResolvedSampling(
        max_tokens=sampling.max_tokens,
        min_tokens=sampling.min_tokens,
        stop_token_ids=frozenset(sampling.stop_token_ids),
        prompt_logprobs=sampling.prompt_logprobs,
    )
    return Request(
        record.request_id,
        record.prompt,
        record.namespace,
        record.arrival_s,
        params,
        tenant=record.tenant,
        priority=record.priority,
        continuations=record.continuations,
        deadline_s=record.deadline_s,
        is_explained=record.is_explained,
        has_reservation=record.has_reservation,
        epoch=record.epoch,
        has_stop_texts=record.has_stop_texts,
        work_tokens=record.work_tokens,
        pins=record.pins,
    )


def row_differences(
    recorded: tuple[PlannedRow, ...],
    now: tuple[PlannedRow, ...],
    recorded_blocks: dict[int, tuple[int, ...]],
    blocks: dict[int, tuple[int, ...]],
    requests: dict[int, str],
) -> tuple[RowDifference, ...]:
    """Return the rows that differ, by sequence, with their complete block tables."""
    base = {row.sequence_id: TableRow(row, recorded_blocks[row.sequence_id]) for row in recorded}
    new = {row.sequence_id: TableRow(row, blocks[row.sequence_id]) for row in now}
    row_ids = [*base, *(row_id for row_id in new if row_id not in base)]
    differences = tuple(
        RowDifference(row_id, requests.get(row_id), base.get(row_id), new.get(row_id))
        for row_id in row_ids
        if base.get(row_id) != new.get(row_id)
    )
    if not differences and [*base] != [*new]:  # only the order differs
        index = next(index for index, pair in enumerate(zip(base, new, strict=True)) if pair[0] != pair[1])
        row_id = [*base][index]
        return (RowDifference(row_id, requests.get(row_id), base[row_id], new[[*new][index]]),)
    return differences


def _row_of(outcome: tuple[int, ...] | TracedOutcome) -> RowResult:
    if isinstance(outcome, TracedOutcome):
        logprobs = (PLACEHOLDER_LOGPROB,) * outcome.num_scores
        error = None if outcome.error is None else RowError(outcome.code or ROW_FAILED, outcome.error)
        return RowResult(outcome.tokens, (), logprobs, (), error, outcome.forced, outcome.work_tokens)
    return RowResult(outcome)


def _record_text(record: EventsRecord | RequestRefused | None) -> str:
    match record:
        case None:
            return "no event"
        case RequestRefused(request_id=request_id, kind=kind):
            return f"{request_id} was rejected: {kind}"
        case EventsRecord(events=events):
            return "; ".join(" ".join(map(str, event)) for event in events)
