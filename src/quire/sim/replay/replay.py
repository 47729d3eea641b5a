"""Replays a trace through the real scheduler and memory, and finds the first difference.

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
    GaveUp,
    Planned,
    PlannedRow,
    PlanRows,
    RequestEnded,
    Restored,
    Returned,
    Submitted,
    TracedOutcome,
    TraceHeader,
    TurnedAway,
    event_fields,
)
from quire.errors import CapacityError, ReplayError, RequestError
from quire.sim.replay.report import PlanDifference, ReplayReport, RowDifference, SessionReport, TableRow
from quire.sim.replay.trace_lines import TraceLine, trace_lines

OnProgress = Callable[[str, int, int], None]
PROGRESS_EVERY = 256
"""Number of lines between two progress updates."""
A_SCORE = TokenLogprobs(0, 0.0, 1, ())
"""Placeholder for each score, because only the number of scores matters."""


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
    """An exception of the scheduler. It is a difference only if the recorded session continued after it."""

    line: int
    words: str


class SessionReplay:
    """Replays one worker's session, from its header on."""

    def __init__(self, line: int, header: TraceHeader) -> None:
        self.header = header
        self.memory = KVMemory(header.memory, BlockHasher(bytes(KEY_BYTES)))
        self.scheduler = make_scheduler(header.scheduler, self.memory, guesses=header.guesses)
        self._line = line
        self._now, self._then = PlanRows(), PlanRows()
        """Converters for this replay's plans and for the recorded plans."""
        self._plan: StepPlan | None = None
        """The plan whose result was not read yet."""
        self._owed: EventsRecord | TurnedAway | None = None
        """The record that the next line must contain."""
        self._failure: _Failure | None = None
        self._difference: PlanDifference | None = None
        self._note = ""
        self._num_requests = self._num_steps = 0

    def report(self) -> SessionReport:
        """Return the result of this session."""
        note = self._note
        if not note and self._failure is not None:
            note = f"it ends with a failure, which also happens here: {self._failure.words}"
        elif not note and self._plan is not None and self._difference is None:
            note = f"step {self._plan.step} has no result: the worker ended during it"
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
        elif isinstance(record, RequestEnded):
            self._note = f"the trace ended before its worker: {record.why}"
        elif self._failure is not None:
            self._differ(line.number, "failure", "went on", self._failure.words)
        else:
            self._run(line.number, record)

    def _run(self, number: int, record: AnyTraceRecord) -> None:
        owed, self._owed = self._owed, None
        if isinstance(record, EventsRecord | TurnedAway):
            if record != owed:
                self._differ(number, "events", _owed_words(record), _owed_words(owed))
            return
        if owed is not None:
            self._differ(number, "events", _owed_words(None), _owed_words(owed))
            return
        try:
            self._obey(number, record)
        except ReplayError:
            raise
        except Exception as error:  # any exception would have ended the recording worker
            self._failure = _Failure(number, f"{type(error).__name__}: {error}")

    def _obey(self, number: int, record: AnyTraceRecord) -> None:
        match record:
            case Submitted() | Restored():
                self._enter(record)
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
            case GaveUp():
                while self.memory.states is not None and self.scheduler.running:
                    self.scheduler.preempt_latest()

    def _enter(self, record: Submitted | Restored) -> None:
        self._num_requests += 1
        enter = self.scheduler.restore if isinstance(record, Restored) else self.scheduler.submit
        try:
            enter(request_of(record))
        except (RequestError, CapacityError) as error:
            self._owed = TurnedAway(request_id=record.request_id, kind=type(error).__name__)

    # -- steps ---------------------------------------------------------------------------------------------------------

    def _compare_plan(self, number: int, record: Planned) -> None:
        plan = self.scheduler.plan(record.at_s, lambda one: one.sequence_id in record.held)
        drafts = {item.sequence_id: item.drafts for item in plan.items if item.num_drafts}
        rows = self._now.of(plan, drafts)
        tables = self._then.follow(record.rows)
        planned = Planned(
            step=plan.step,
            at_s=record.at_s,
            rows=rows,
            copies=plan.copies,
            slot_copies=plan.slot_copies,
            keeps=plan.keeps,
            held=plan.held,
        )
        if planned != record:
            found = row_differences(record.rows, rows, tables, self._now.blocks, self._names())
            moves = [] if found else [f"{name} {getattr(one, name)}" for name in MOVES for one in (record, planned)]
            recorded, now = " ".join(moves[::2]), " ".join(moves[1::2])
            self._differ(number, "plan", recorded, now, record.step, found)
        elif plan.items:
            self._num_steps += 1
            self._plan = plan
        else:
            self._owe(self.scheduler.take_events())

    def _apply(self, number: int, record: Returned) -> None:
        plan, self._plan = self._plan, None
        if plan is None or len(record.outcomes) != len(plan.items):
            raise ReplayError(f"line {number} of the trace is damaged: its result belongs to no plan")
        rows = {
            item.sequence_id: _row_of(outcome)
            for item, outcome in zip(plan.items, record.outcomes, strict=True)
            if outcome is not None
        }
        self._owe(self.scheduler.apply(StepResult(record.step, rows), record.at_s))

    def _owe(self, events: Iterable[RequestEvent]) -> None:
        if found := event_fields(events):
            self._owed = EventsRecord(events=found)

    def _names(self) -> dict[int, str]:
        return {one.sequence_id: name for name, live in self.scheduler.live.items() for one in live.sequences}

    def _differ(
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


MOVES = ("step", "copies", "slot_copies", "keeps", "held")
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
    )


def row_differences(
    recorded: tuple[PlannedRow, ...],
    now: tuple[PlannedRow, ...],
    recorded_blocks: dict[int, tuple[int, ...]],
    blocks: dict[int, tuple[int, ...]],
    requests: dict[int, str],
) -> tuple[RowDifference, ...]:
    """Return the rows that differ, by sequence, with their whole block tables."""
    before = {row.sequence_id: TableRow(row, recorded_blocks[row.sequence_id]) for row in recorded}
    after = {row.sequence_id: TableRow(row, blocks[row.sequence_id]) for row in now}
    names = [*before, *(name for name in after if name not in before)]
    found = tuple(
        RowDifference(name, requests.get(name), before.get(name), after.get(name))
        for name in names
        if before.get(name) != after.get(name)
    )
    if not found and [*before] != [*after]:  # only the order differs
        at = next(at for at, pair in enumerate(zip(before, after, strict=True)) if pair[0] != pair[1])
        name = [*before][at]
        return (RowDifference(name, requests.get(name), before[name], after[[*after][at]]),)
    return found


def _row_of(outcome: tuple[int, ...] | TracedOutcome) -> RowResult:
    if isinstance(outcome, TracedOutcome):
        scores = (A_SCORE,) * outcome.num_scores
        error = None if outcome.error is None else RowError(outcome.code or ROW_FAILED, outcome.error)
        return RowResult(outcome.tokens, (), scores, (), error, outcome.forced, outcome.work_tokens)
    return RowResult(outcome)


def _owed_words(record: EventsRecord | TurnedAway | None) -> str:
    match record:
        case None:
            return "no event"
        case TurnedAway(request_id=request_id, kind=kind):
            return f"{request_id} was rejected: {kind}"
        case EventsRecord(events=events):
            return "; ".join(" ".join(map(str, event)) for event in events)
