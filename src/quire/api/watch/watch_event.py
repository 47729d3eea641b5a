"""Build one event of the watch stream: the engine's snapshot and the server's requests. Bounded, without clients' text.

docs/reference/watch.md documents the format.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict
from time import monotonic
from typing import Any

import msgspec

from quire.api.access.admission import Admission
from quire.api.http.request_record import RequestRecord
from quire.api.models.registry import ModelEntry
from quire.api.watch.activity import MAX_TIMELINES, Activity, OpenRequests, RequestTotals
from quire.api.watch.timeline import shown_id, timeline_of
from quire.core.inspect.snapshots import (
    MAX_RUNNING_SHOWN,
    CellCounts,
    EngineSnapshot,
    PoolCells,
    RunningFigures,
    TreePicture,
)

VERSION = 1
MAX_WARNINGS = 64
MAX_QUEUES = 200
"""Maximum number of queues (class and tenant) in an event; the longest ones are included."""


def warnings_of(server: Admission, now_s: float, *, includes_lines: bool) -> list[dict[str, Any]]:
    """Return the prefix guard's warnings. With `includes_lines` they include prompt lines, which are clients' text."""
    warnings = server.prefix_guard.warnings(now_s, includes_lines=includes_lines)
    return [
        {
            "tenant": warning.tenant,
            "line": warning.line or warning.description,
            "num_lost_tokens": warning.num_lost_tokens,
            "num_requests": warning.num_requests,
            "kind": warning.kind,
        }
        for warning in warnings[:MAX_WARNINGS]
    ]


def watch_event(
    server: Admission,
    activity: Activity,
    model: ModelEntry,
    snapshot: tuple[EngineSnapshot, float] | None,
    watched_models: Iterable[str],
) -> dict[str, Any]:
    """Return an event without history and warnings. `snapshot` is the engine's latest one, if any, with its arrival
    time; all steps in it are sent."""
    now_s, open_requests, watched = monotonic(), server.open_requests, frozenset(watched_models)
    records = activity.open_of(model.name)
    totals = activity.of(model.name).totals(records)
    return {
        "v": VERSION,
        "at_s": round(now_s, 4),
        "model": model.name,
        "models": [
            {"name": other.name, "state": other.state, "is_watched": other.name in watched} for other in server.models
        ],
        "engine": _engine(model),
        "pool": _pool_from_stats(model) if snapshot is None else snapshot[0].pool,
        "tree": TreePicture() if snapshot is None else snapshot[0].tree,
        "steps": [] if snapshot is None else _steps(*snapshot),
        "running": _running_of(records) if snapshot is None else _with_client_ids(snapshot[0].running, records),
        "queue": _queues(open_requests, model.name),
        "requests": _timelines(activity, open_requests),
        "misses": server.reuse_log.misses(now_s, model.name),
        "totals": totals,
        "workers": () if model.engine_client is None else model.engine_client.workers,
        "fleet": _fleet(model, totals),
    }


def _engine(model: ModelEntry) -> dict[str, Any] | None:
    stats = model.stats()
    if stats is None:
        return None
    return {"num_steps": stats.num_steps, "num_computed_tokens": stats.num_computed_tokens, "step_s": stats.step_s}


def _pool_from_stats(model: ModelEntry) -> PoolCells:
    """Return a pool without cells, with the numbers of blocks in the engine's statistics."""
    stats = model.stats()
    if stats is None or not stats.num_blocks:
        return PoolCells()
    num_used = round(stats.kv_usage * stats.num_blocks)
    counts = CellCounts(free=stats.num_blocks - num_used, used=num_used)
    return PoolCells(stats.num_blocks, stats.block_size, 1, b"", counts)


def _steps(snapshot: EngineSnapshot, received_s: float) -> list[dict[str, Any]]:
    """Return the steps with times of this process's clock: workers send only ages."""
    steps = [msgspec.structs.asdict(step) for step in snapshot.steps]
    return [{"at_s": round(received_s - step.pop("age_s"), 4), **step} for step in steps]


def _with_client_ids(running: Iterable[RunningFigures], records: Iterable[RequestRecord]) -> list[RunningFigures]:
    """Replace the engine's request ids by the ids that clients received."""
    client_ids = {handle.request_id: shown_id(record) for record in records for handle in record.handles}
    replace = msgspec.structs.replace
    return [replace(row, request_id=client_ids.get(row.request_id, row.request_id)) for row in running]


def _running_of(records: Iterable[RequestRecord]) -> list[RunningFigures]:
    """Return the running requests as this process knows them; used without a snapshot, as for fleet members."""
    return [
        RunningFigures(
            shown_id(record),
            record.tenant,
            record.priority,
            "answer" if num_output else "prompt",
            num_prompt + num_output - 1 if num_output else record.num_cached_tokens,
            num_prompt + num_output,
            num_prompt,
            record.num_cached_tokens,
            num_output,
        )
        for record in records
        for num_prompt, num_output in [(record.num_prompt_tokens, record.num_output_tokens)]
        if record.has_started
    ][:MAX_RUNNING_SHOWN]


def _queues(open_requests: OpenRequests, model: str) -> list[dict[str, Any]]:
    waiting = Counter(
        (record.priority, record.tenant)
        for record, _ in open_requests.values()
        if record.model == model and record.is_waiting
    )
    return [
        {"class": priority, "tenant": tenant, "num_requests": count}
        for (priority, tenant), count in waiting.most_common(MAX_QUEUES)
    ]


def _timelines(activity: Activity, open_requests: OpenRequests) -> list[dict[str, Any]]:
    """Return the latest timelines: ended requests, then open ones."""
    now_open = [timeline_of(record) for record, _ in list(open_requests.values())[-MAX_TIMELINES:] if record.model]
    return [*activity.timelines, *now_open][-MAX_TIMELINES:]


def _fleet(model: ModelEntry, totals: RequestTotals) -> dict[str, Any] | None:
    fleet = model.fleet_stats()
    if fleet is None:
        return None
    hit_rate = totals.num_cached_tokens / totals.num_prompt_tokens if totals.num_prompt_tokens else None
    return asdict(fleet) | {"hit_rate": hit_rate}
