"""The lines of a trace: an engine's commands and steps, in order, as tagged JSON objects.

    header                                          begins a session: the lines of one worker process
    submit | restore  ─► refused?                   a request as the scheduler received it, and whether it was refused
    cancel, clear, explain
    plan ─► result ─► events?                       a step: its plan, its result, and the events returned

A trace contains everything that plans depend on: settings, commands in order, every time passed to the scheduler, and
the runner's results. A scheduler that receives these lines again must therefore make identical plans. Token ids are
permuted (`PermutedTokenIds`). Text and grammars are not recorded, only whether a request had a grammar.
"""

from array import array
from collections.abc import Callable, Iterable, Mapping
from hashlib import blake2b
from typing import Annotated, NamedTuple

import msgspec

from quire.core.digests import Namespace
from quire.core.events import (
    Admitted,
    Finished,
    FirstToken,
    Preempted,
    RequestEvent,
    SequenceFinished,
    Token,
)
from quire.core.memory.kv_config import KVMemoryConfig
from quire.core.request import Continuation, PriorityClass, PromptPin
from quire.core.scheduling.scheduler_config import SchedulerConfig
from quire.core.step import StepPlan

TRACE_VERSION = 1
RecordedTokenId = Annotated[int, msgspec.Meta(ge=0, le=(1 << 31) - 1)]
Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 53) - 1)]
Seconds = Annotated[float, msgspec.Meta(ge=-1e15, le=1e15)]


class TraceRecord(msgspec.Struct, frozen=True, tag_field="is"):
    """A line of a trace, tagged with its type."""


class TraceHeader(TraceRecord, frozen=True, kw_only=True, tag="header"):
    """The start of a session, with the settings of its worker."""

    quire_trace: int = TRACE_VERSION
    """Version of the trace format. This field identifies a trace file."""
    quire: str
    """The version of quire that wrote the trace."""
    model: str
    """The model's fingerprint and KV layout, as in block namespaces."""
    started_unix_s: float
    vocabulary_size: Count
    has_real_token_ids: bool = msgspec.field(name="has_own_tokens")
    """Whether token ids are the real ones, not permuted."""
    has_grammars: bool
    has_ngram_drafts: bool = msgspec.field(name="guesses")
    """Whether draft tokens are proposed from n-grams (`core.scheduling.ngrams`)."""
    memory: KVMemoryConfig
    scheduler: SchedulerConfig


class TracedSampling(msgspec.Struct, frozen=True):
    """The sampling parameters that affect the scheduler, and a few more for statistics."""

    max_tokens: Count
    min_tokens: Count = 0
    stop_token_ids: tuple[RecordedTokenId, ...] = ()
    prompt_logprobs: Count | None = None
    logprobs: Count | None = None
    temperature: float = 1.0


class _RequestRecord(TraceRecord, frozen=True, kw_only=True):
    """A request as the scheduler received it. The fields are those of `core.request.Request`."""

    request_id: str
    prompt: tuple[RecordedTokenId, ...]
    namespace: Namespace
    arrival_s: Seconds
    sampling: TracedSampling
    tenant: str
    priority: PriorityClass
    continuations: tuple[Continuation, ...]
    deadline_s: Seconds | None = None
    is_explained: bool = False
    has_reservation: bool = msgspec.field(default=False, name="is_promised")
    epoch: int = 0
    has_grammar: bool = False
    has_stop_texts: bool = False
    work_tokens: Count = 0
    pins: tuple[PromptPin, ...] = ()


class Submitted(_RequestRecord, frozen=True, kw_only=True, tag="submit"):
    """A new request."""


class Restored(_RequestRecord, frozen=True, kw_only=True, tag="restore"):
    """A request that an earlier engine had admitted, with the tokens produced so far."""


class RequestRefused(TraceRecord, frozen=True, kw_only=True, tag="refused"):
    """The scheduler refused the request of the previous line."""

    request_id: str
    kind: str
    """Class name of the error."""


class Cancelled(TraceRecord, frozen=True, kw_only=True, tag="cancel"):
    """A request, or a single continuation of it, was cancelled."""

    request_id: str
    index: int | None = None


class Cleared(TraceRecord, frozen=True, kw_only=True, tag="clear"):
    """Every unused cached block was dropped."""


class ExplainedRecord(TraceRecord, frozen=True, kw_only=True, tag="explain"):
    """An explain request. Recorded because it sets the time of the KV memory."""

    at_s: Seconds


class PlannedRow(NamedTuple):
    """The work of one sequence in a step."""

    sequence_id: Count
    num_tokens: Count
    """Tokens fed, including drafts."""
    first_position: Count
    num_same: Count
    """Number of leading blocks that are the same as in the previous plan."""
    new_blocks: tuple[Count, ...]
    """The blocks after the unchanged ones."""
    sampled_position: Count | None
    """Position of the first sampled token; None: no token is sampled."""
    num_prompt_logprobs: Count
    drafts: tuple[RecordedTokenId, ...]
    state_slot: Count


class Planned(TraceRecord, frozen=True, kw_only=True, tag="plan"):
    """A planned step. Without rows nothing runs, and no result follows. The copies are those of `StepPlan`."""

    step: Count
    at_s: Seconds
    rows: tuple[PlannedRow, ...]
    copies: tuple[tuple[Count, Count], ...] = ()
    slot_copies: tuple[tuple[Count, Count], ...] = ()
    keeps: tuple[tuple[Count, Count], ...] = ()
    waiting_ids: tuple[Count, ...] = msgspec.field(default=(), name="held")
    """Ids of running sequences that were left out, because their grammar masks were not ready."""


class TracedOutcome(msgspec.Struct, frozen=True, omit_defaults=True):
    """The outcome of a row, if it has more than sampled tokens. The fields are those of `RowResult`."""

    tokens: tuple[RecordedTokenId, ...] = ()
    forced: tuple[RecordedTokenId, ...] = ()
    num_scores: Annotated[int, msgspec.Meta(ge=0, le=1 << 24)] = 0
    error: str | None = None
    work_tokens: Count = 0
    """Charged to the tenant for the processor time of masks; recorded because a replay cannot measure time."""
    code: str | None = None
    """Code of the error; missing in files of earlier versions."""


class Returned(TraceRecord, frozen=True, kw_only=True, tag="result"):
    """The runner's result: for each row its sampled tokens or a TracedOutcome; null for a row without a result."""

    step: Count
    at_s: Seconds
    outcomes: tuple[tuple[RecordedTokenId, ...] | TracedOutcome | None, ...]


class EventsRecord(TraceRecord, frozen=True, kw_only=True, tag="events"):
    """Events returned since the previous line, except `Token` events, because tokens are in the result."""

    events: tuple[tuple[str | int, ...], ...]


class StepAborted(TraceRecord, frozen=True, kw_only=True, tag="gave_up"):
    """The step was aborted, and all sequences with recurrent state were preempted."""


class RecordingEnded(TraceRecord, frozen=True, kw_only=True, tag="ended"):
    """The recording ended before the worker, for example because of a write error."""

    why: str


AnyTraceRecord = (
    TraceHeader
    | Submitted
    | Restored
    | RequestRefused
    | Cancelled
    | Cleared
    | ExplainedRecord
    | Planned
    | Returned
    | EventsRecord
    | StepAborted
    | RecordingEnded
)


def event_fields(events: Iterable[RequestEvent]) -> tuple[tuple[str | int, ...], ...]:
    """Return the recorded fields of these events, without `Token` events."""
    return tuple(fields for event in events if type(event) is not Token and (fields := _fields_of(event)))


def _fields_of(event: RequestEvent) -> tuple[str | int, ...]:
    match event:
        case Admitted(request_id=request_id, num_cached_tokens=num_cached):
            return "admitted", request_id, num_cached
        case FirstToken(request_id=request_id, num_cached_tokens=num_cached):
            return "first_token", request_id, num_cached
        case Preempted(request_id=request_id, sequence_index=index):
            return "preempted", request_id, index
        case SequenceFinished(request_id=request_id, sequence_index=index, reason=reason, num_output_tokens=count):
            return "answer_ended", request_id, index, reason.value, count
        case Finished():
            counts = event.num_prompt_tokens, event.num_cached_tokens, event.num_output_tokens
            return "finished", event.request_id, *counts
    return ()


class PlanRows:
    """Converts plans to trace rows and back. Rows list only the blocks that are new since the previous plan."""

    def __init__(self) -> None:
        self.blocks: dict[int, tuple[int, ...]] = {}
        """Block ids by sequence, from the last plan with rows."""

    def to_rows(self, plan: StepPlan, drafts: Mapping[int, tuple[int, ...]]) -> tuple[PlannedRow, ...]:
        """Convert a plan to rows; `drafts`: sequence id -> drafts with recorded token ids."""
        rows, old_blocks = [], self.blocks
        for item in plan.items:
            sequence_id, blocks, sampling = item.sequence_id, item.block_ids, item.sampling
            num_same = common_prefix_length(old_blocks.get(sequence_id, ()), blocks)
            rows.append(
                PlannedRow(
                    sequence_id,
                    len(item.token_ids),
                    item.first_position,
                    num_same,
                    blocks[num_same:],
                    None if sampling is None else sampling.position,
                    0 if item.scoring is None else len(item.scoring.token_ids),
                    drafts.get(sequence_id, ()),
                    item.state_slot,
                )
            )
        if plan.items:
            self.blocks = {item.sequence_id: item.block_ids for item in plan.items}
        return tuple(rows)

    def to_block_tables(self, rows: Iterable[PlannedRow]) -> dict[int, tuple[int, ...]]:
        """Return the full block tables of recorded rows, by sequence."""
        old = self.blocks
        tables = {row.sequence_id: (*old.get(row.sequence_id, ())[: row.num_same], *row.new_blocks) for row in rows}
        self.blocks = tables or old
        return tables


def common_prefix_length(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    """Return the length of the common prefix."""
    count = min(len(a), len(b))
    if a[:count] == b[:count]:
        return count
    return next(index for index in range(count) if a[index] != b[index])


TokenIdMapping = Callable[[Iterable[int]], list[int]]
"""Maps token ids to recorded ids, in order; `list` keeps them unchanged."""


class PermutedTokenIds:
    """Maps token ids to recorded ids by a keyed permutation of the vocabulary."""

    def __init__(self, vocabulary_size: int, key: bytes) -> None:
        keyed_hash = blake2b(key=key, digest_size=16, person=b"quire.trace")

        def digest_of(token_id: int) -> bytes:
            state = keyed_hash.copy()
            state.update(token_id.to_bytes(4, "little"))
            return state.digest()

        self._permutation = array("I", sorted(range(vocabulary_size), key=digest_of))

    def __call__(self, token_ids: Iterable[int]) -> list[int]:
        permutation, size = self._permutation, len(self._permutation)
        return [permutation[token_id] if token_id < size else token_id for token_id in token_ids]
