"""The lines of a trace: what an engine was told and what it did, in order, as tagged JSON objects.

    header                                          once for each life of a worker
    submit | restore  ─► refused?                   a request as the scheduler got it, and whether it was let in
    cancel, clear, explain
    plan ─► result ─► events?                       a step: what was planned, what came of it, what was told

All that plans depend on is here: settings, commands in their order, every reading of the clock that was handed in, and
what the device answered. So a scheduler that gets these lines again must make the same plans. Token ids are
under the names that `PermutedNames` gives them; no text is here, and of a grammar only that there was one.
"""

from array import array
from collections.abc import Iterable, Mapping
from hashlib import blake2b
from typing import Annotated, NamedTuple, Protocol

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
from quire.core.request import Continuation, PriorityClass
from quire.core.scheduling.scheduler_config import SchedulerConfig
from quire.core.step import StepPlan

TRACE_VERSION = 1
TokenName = Annotated[int, msgspec.Meta(ge=0, le=(1 << 31) - 1)]
Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 53) - 1)]
Seconds = Annotated[float, msgspec.Meta(ge=-1e15, le=1e15)]


class TraceRecord(msgspec.Struct, frozen=True, tag_field="is"):
    """An object that says what it is."""


class TraceHeader(TraceRecord, frozen=True, kw_only=True, tag="header"):
    """A worker's life begins."""

    quire_trace: int = TRACE_VERSION
    """Of this form. By this field the file is known."""
    quire: str
    """The version that wrote it."""
    model: str
    """What its blocks are named by."""
    started_unix_s: float
    vocabulary_size: Count
    has_own_tokens: bool
    """Tokens have their own ids, and not those of a permutation."""
    has_grammars: bool
    guesses: bool
    """Whether sequences guess what follows (`core.ngrams`)."""
    memory: KVMemoryConfig
    scheduler: SchedulerConfig


class TracedSampling(msgspec.Struct, frozen=True):
    """What of a request's parameters the scheduler looks at, and a little beside."""

    max_tokens: Count
    min_tokens: Count = 0
    stop_token_ids: tuple[TokenName, ...] = ()
    prompt_logprobs: Count | None = None
    logprobs: Count | None = None
    temperature: float = 1.0


class _Entered(TraceRecord, frozen=True, kw_only=True):
    """A request as the scheduler got it."""

    request_id: str
    prompt: tuple[TokenName, ...]
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


class Submitted(_Entered, frozen=True, kw_only=True, tag="submit"):
    """A new one."""


class Restored(_Entered, frozen=True, kw_only=True, tag="restore"):
    """One that an engine before this one had let in, with the tokens it had."""


class TurnedAway(TraceRecord, frozen=True, kw_only=True, tag="refused"):
    """The request of the line before was not let in."""

    request_id: str
    kind: str
    """Name of the error."""


class Cancelled(TraceRecord, frozen=True, kw_only=True, tag="cancel"):
    """A request, or one of its answers alone, was to end."""

    request_id: str
    index: int | None = None


class Cleared(TraceRecord, frozen=True, kw_only=True, tag="clear"):
    """Every cached block was forgotten."""


class ExplainedRecord(TraceRecord, frozen=True, kw_only=True, tag="explain"):
    """An explain request, which passes the time to the memory."""

    at_s: Seconds


class PlannedRow(NamedTuple):
    """What one sequence was to do in a step."""

    sequence_id: Count
    num_tokens: Count
    """Fed, drafts among them."""
    first_position: Count
    num_held: Count
    """So many of its blocks, from the first on, are as in the plan before."""
    new_blocks: tuple[Count, ...]
    """And these follow them."""
    sampled_position: Count | None
    """Where the token stands that is chosen first; None: none is."""
    num_scored: Count
    drafts: tuple[TokenName, ...]
    state_slot: Count


class Planned(TraceRecord, frozen=True, kw_only=True, tag="plan"):
    """A step was planned at this moment; without rows nothing runs, and no result follows."""

    step: Count
    at_s: Seconds
    rows: tuple[PlannedRow, ...]
    copies: tuple[tuple[Count, Count], ...] = ()
    slot_copies: tuple[tuple[Count, Count], ...] = ()
    keeps: tuple[tuple[Count, Count], ...] = ()
    held: tuple[Count, ...] = ()
    """Sequences that ran and were left out: what they needed beside the step was not there yet."""


class TracedOutcome(msgspec.Struct, frozen=True, omit_defaults=True):
    """What came of a row where that is more than tokens."""

    tokens: tuple[TokenName, ...] = ()
    forced: tuple[TokenName, ...] = ()
    num_scores: Annotated[int, msgspec.Meta(ge=0, le=1 << 24)] = 0
    error: str | None = None
    work_tokens: Count = 0
    """What was charged beside the tokens: a replay has no clock of its own."""
    code: str | None = None
    """Of the error; files of earlier versions have none."""


class Returned(TraceRecord, frozen=True, kw_only=True, tag="result"):
    """What the device answered: of each row the tokens chosen, or more; null where a row has no answer."""

    step: Count
    at_s: Seconds
    outcomes: tuple[tuple[TokenName, ...] | TracedOutcome | None, ...]


class EventsRecord(TraceRecord, frozen=True, kw_only=True, tag="events"):
    """What was told since the line before, tokens aside: they are in the result."""

    events: tuple[tuple[str | int, ...], ...]


class GaveUp(TraceRecord, frozen=True, kw_only=True, tag="gave_up"):
    """The step broke off, and what ran was to begin again from a kept state."""


class RequestEnded(TraceRecord, frozen=True, kw_only=True, tag="ended"):
    """The trace ends before the worker does."""

    why: str


AnyTraceRecord = (
    TraceHeader
    | Submitted
    | Restored
    | TurnedAway
    | Cancelled
    | Cleared
    | ExplainedRecord
    | Planned
    | Returned
    | EventsRecord
    | GaveUp
    | RequestEnded
)


def event_fields(events: Iterable[RequestEvent]) -> tuple[tuple[str | int, ...], ...]:
    """What a trace has of these."""
    return tuple(found for event in events if type(event) is not Token and (found := _fields_of(event)))


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
    """Plans as a trace has them: of a sequence's blocks those that are new since the plan before."""

    __slots__ = ("blocks",)

    def __init__(self) -> None:
        self.blocks: dict[int, tuple[int, ...]] = {}
        """Of each sequence of the last plan that had any."""

    def of(self, plan: StepPlan, drafts: Mapping[int, tuple[int, ...]]) -> tuple[PlannedRow, ...]:
        """The rows of a plan; `drafts` by sequence, as the trace has them."""
        rows, before = [], self.blocks
        for item in plan.items:
            sequence_id, blocks, sampling = item.sequence_id, item.block_ids, item.sampling
            num_held = num_equal(before.get(sequence_id, ()), blocks)
            rows.append(
                PlannedRow(
                    sequence_id,
                    len(item.token_ids),
                    item.first_position,
                    num_held,
                    blocks[num_held:],
                    None if sampling is None else sampling.position,
                    0 if item.scoring is None else len(item.scoring.token_ids),
                    drafts.get(sequence_id, ()),
                    item.state_slot,
                )
            )
        if plan.items:
            self.blocks = {item.sequence_id: item.block_ids for item in plan.items}
        return tuple(rows)

    def follow(self, rows: Iterable[PlannedRow]) -> dict[int, tuple[int, ...]]:
        """The whole tables of rows that a trace has, by sequence."""
        before = self.blocks
        found = {row.sequence_id: (*before.get(row.sequence_id, ())[: row.num_held], *row.new_blocks) for row in rows}
        self.blocks = found or before
        return found


def num_equal(some: tuple[int, ...], others: tuple[int, ...]) -> int:
    """How many of the first ones are the same."""
    count = min(len(some), len(others))
    if some[:count] == others[:count]:
        return count
    return next(at for at in range(count) if some[at] != others[at])


class TraceTokenNames(Protocol):
    """From token ids to what a trace has in their place."""

    def __call__(self, token_ids: Iterable[int]) -> list[int]:
        """The names of these, in their order."""
        ...


def own_names(token_ids: Iterable[int]) -> list[int]:
    """Tokens under the ids they have."""
    return list(token_ids)


class PermutedNames:
    """Each id of a vocabulary under another of its ids."""

    __slots__ = ("_names",)

    def __init__(self, vocabulary_size: int, key: bytes) -> None:
        keyed = blake2b(key=key, digest_size=16, person=b"quire.trace")

        def mixed(token_id: int) -> bytes:
            state = keyed.copy()
            state.update(token_id.to_bytes(4, "little"))
            return state.digest()

        self._names = array("I", sorted(range(vocabulary_size), key=mixed))

    def __call__(self, token_ids: Iterable[int]) -> list[int]:
        """As `TraceTokenNames` says."""
        names, size = self._names, len(self._names)
        return [names[token_id] if token_id < size else token_id for token_id in token_ids]
