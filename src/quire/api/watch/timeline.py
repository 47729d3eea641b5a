"""When a request waited, had its prompt computed, was answered, and was interrupted: by times that are recorded anyway.

A request that gave up its place counts as preempted until something of it comes again.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from quire.api.http.request_record import RequestRecord

MAX_SEGMENTS = 32


class Segment(NamedTuple):
    """A part of a request's life; without an end, it goes on."""

    phase: str
    """`waiting`, `prompt`, `answering` or `preempted`."""
    start_s: float
    end_s: float | None


def shown_id(record: RequestRecord) -> str:
    """As in its response's `x-request-id`."""
    return record.client_id or record.request_id


def first_token_s(record: RequestRecord) -> float | None:
    """When the first token of any of its prompts came."""
    return min((one.reply.moments["first"] for one in record.handles if "first" in one.reply.moments), default=None)


def request_line(record: RequestRecord, ended_s: float | None = None) -> dict[str, Any]:
    """A request as the timeline shows it."""
    return {
        "request_id": shown_id(record),
        "tenant": record.tenant,
        "class": record.priority,
        "model": record.model,
        "state": record.state if ended_s is None else _how_it_ended(record),
        "segments": segments_of(record, ended_s),
    }


def segments_of(record: RequestRecord, ended_s: float | None) -> list[Segment]:
    """Of all its prompts together: it waits until one is admitted, and answers until all are answered."""
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
    return [_rounded(one) for one in segments[-MAX_SEGMENTS:]]


def _cut(segment: Segment, pauses: Sequence[tuple[float, float | None]]) -> Iterator[Segment]:
    """The segment without its pauses, and these."""
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


def _rounded(one: Segment) -> Segment:
    return Segment(one.phase, round(one.start_s, 4), None if one.end_s is None else round(one.end_s, 4))


def _how_it_ended(record: RequestRecord) -> str:
    if record.is_cut:
        return "cut"
    return "done" if record.handles and all(one.reply.is_answered for one in record.handles) else "failed"
