"""The timeline of a request: when it waited, was in prefill, generated, or was preempted. From times recorded anyway.

After a preemption a request counts as preempted until its next output arrives.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from quire.api.http.request_record import RequestRecord

MAX_SEGMENTS = 32


class Segment(NamedTuple):
    """One phase of a request's timeline; without an end, it is the current phase."""

    phase: str
    """`waiting`, `prompt`, `answering` or `preempted`."""
    start_s: float
    end_s: float | None


def shown_id(record: RequestRecord) -> str:
    """Return the id that the response has as `x-request-id`."""
    return record.client_id or record.request_id


def first_token_s(record: RequestRecord) -> float | None:
    """Return when the first token of any of the request's prompts arrived."""
    return min((one.reply.moments["first"] for one in record.handles if "first" in one.reply.moments), default=None)


def request_line(record: RequestRecord, ended_s: float | None = None) -> dict[str, Any]:
    """Return the request as the timeline shows it."""
    return {
        "request_id": shown_id(record),
        "tenant": record.tenant,
        "class": record.priority,
        "model": record.model,
        "state": record.state if ended_s is None else _how_it_ended(record),
        "segments": segments_of(record, ended_s),
    }


def segments_of(record: RequestRecord, ended_s: float | None) -> list[Segment]:
    """Return the phases of all prompts together: waiting until one is admitted, answering until all are answered."""
    moments = [one.reply.moments for one in record.handles]
    admitted = min((times["admitted"] for times in moments if "admitted" in times), default=None)
    first = first_token_s(record)
    borders = [("waiting", record.started_s), ("prompt", admitted), ("answering", first)]
    begun = [(phase, at_s) for phase, at_s in borders if at_s is not None]
    ends = [*(at_s for _, at_s in begun[1:]), ended_s]
    pauses = sorted(pause for one in record.handles for pause in one.reply.pauses)
    segments: list[Segment] = []
    for (phase, start_s), end_s in zip(begun, ends, strict=True):
        segments += _cut(Segment(phase, start_s, end_s), pauses)
    return [
        Segment(phase, round(start_s, 4), None if end_s is None else round(end_s, 4))
        for phase, start_s, end_s in segments[-MAX_SEGMENTS:]
    ]


def _cut(segment: Segment, pauses: Sequence[tuple[float, float | None]]) -> Iterator[Segment]:
    """Split a segment at the pauses, and yield the parts and the pauses in order."""
    phase, at_s, end_s = segment
    for start_s, over_s in pauses:
        if start_s < at_s or (end_s is not None and start_s >= end_s):
            continue
        if start_s > at_s:
            yield Segment(phase, at_s, start_s)
        if over_s is None or (end_s is not None and over_s >= end_s):
            yield Segment("preempted", start_s, end_s)
            return
        yield Segment("preempted", start_s, over_s)
        at_s = over_s
    yield Segment(phase, at_s, end_s)


def _how_it_ended(record: RequestRecord) -> str:
    if record.is_cut:
        return "cut"
    return "done" if record.handles and all(one.reply.is_answered for one in record.handles) else "failed"
