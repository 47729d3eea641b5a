"""The timeline of a request: when it waited, was in prefill, generated output, or was preempted.

After a preemption a request counts as preempted until its next output arrives.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from quire.api.http.request_record import RequestRecord

MAX_SEGMENTS = 32


class Segment(NamedTuple):
    """One phase of a request's timeline; the current phase has no end."""

    phase: str
    """`waiting`, `prompt`, `answering` or `preempted`."""
    start_s: float
    end_s: float | None


def shown_id(record: RequestRecord) -> str:
    """Return the id in the response's `x-request-id` header."""
    return record.client_id or record.request_id


def first_token_s(record: RequestRecord) -> float | None:
    """Return when the first token of any of the request's prompts arrived."""
    replies = (handle.reply for handle in record.handles)
    return min((reply.times["first"] for reply in replies if "first" in reply.times), default=None)


def timeline_of(record: RequestRecord, ended_s: float | None = None) -> dict[str, Any]:
    """Return a request and its phases. `ended_s` is the time at which it ended; None: it is open."""
    return {
        "request_id": shown_id(record),
        "tenant": record.tenant,
        "class": record.priority,
        "model": record.model,
        "state": record.state if ended_s is None else _outcome(record),
        "segments": segments_of(record, ended_s),
    }


def segments_of(record: RequestRecord, ended_s: float | None) -> list[Segment]:
    """Return the phases of all prompts together: waiting until one is admitted, answering until all are answered."""
    moments = [handle.reply.times for handle in record.handles]
    admitted = min((times["admitted"] for times in moments if "admitted" in times), default=None)
    phases = [("waiting", record.started_s), ("prompt", admitted), ("answering", first_token_s(record))]
    starts = [(phase, start_s) for phase, start_s in phases if start_s is not None]
    ends = [*(start_s for _, start_s in starts[1:]), ended_s]
    preemptions = sorted(pause for handle in record.handles for pause in handle.reply.pauses)
    segments: list[Segment] = []
    for (phase, start_s), end_s in zip(starts, ends, strict=True):
        segments += _split(Segment(phase, start_s, end_s), preemptions)
    return [
        Segment(phase, round(start_s, 4), None if end_s is None else round(end_s, 4))
        for phase, start_s, end_s in segments[-MAX_SEGMENTS:]
    ]


def _split(segment: Segment, preemptions: Sequence[tuple[float, float | None]]) -> Iterator[Segment]:
    """Split a segment at preemptions, and yield its parts and the preemptions in order."""
    phase, start_s, end_s = segment
    for preempted_s, resumed_s in preemptions:
        if preempted_s < start_s or (end_s is not None and preempted_s >= end_s):
            continue
        if preempted_s > start_s:
            yield Segment(phase, start_s, preempted_s)
        if resumed_s is None or (end_s is not None and resumed_s >= end_s):
            yield Segment("preempted", preempted_s, end_s)
            return
        yield Segment("preempted", preempted_s, resumed_s)
        start_s = resumed_s
    yield Segment(phase, start_s, end_s)


def _outcome(record: RequestRecord) -> str:
    if record.is_cut:
        return "cut"
    return "done" if record.handles and all(handle.reply.is_answered for handle in record.handles) else "failed"
