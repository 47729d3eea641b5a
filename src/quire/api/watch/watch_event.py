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
from quire.api.watch.activity import MAX_ENDED, Activity, OpenRequests, RequestTotals
from quire.api.watch.timeline import request_line, shown_id
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


def warnings_of(server: Admission, now_s: float, *, reads_lines: bool) -> list[dict[str, Any]]:
    """Return the prefix guard's warnings. Lines are clients' text, so only some subscribers may read them."""
    found = server.prefix_guard.warnings(now_s, reads_lines=reads_lines)
    return [
        {
            "tenant": one.tenant,
            "line": one.line or one.description,
            "num_lost_tokens": one.num_lost_tokens,
            "num_requests": one.num_requests,
            "kind": one.kind,
        }
        for one in found[:MAX_WARNINGS]
    ]


def watch_event(
    server: Admission,
    activity: Activity,
    model: ModelEntry,
    shown: tuple[EngineSnapshot, float] | None,
    watched: Iterable[str],
) -> dict[str, Any]:
    """Return an event without history and warnings. `shown` is the latest snapshot, if any, and when it arrived; the
    snapshot's steps are included."""
    now_s, open_requests, is_watched = monotonic(), server.open_requests, frozenset(watched)
    records = activity.open_of(model.name)
    totals = activity.of(model.name).totals(records)
    return {
        "v": VERSION,
        "at_s": round(now_s, 4),
        "model": model.name,
        "models": [
            {"name": one.name, "state": one.state, "is_watched": one.name in is_watched} for one in server.models
        ],
        "engine": _engine(model),
        "pool": _no_pool(model) if shown is None else shown[0].pool,
        "tree": TreePicture() if shown is None else shown[0].tree,
        "steps": [] if shown is None else _steps(*shown),
        "running": _guessed(records) if shown is None else _named(shown[0].running, records),
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


def _no_pool(model: ModelEntry) -> PoolCells:
    """Return a pool of which only the numbers of blocks are known."""
    stats = model.stats()
    if stats is None or not stats.num_blocks:
        return PoolCells()
    num_used = round(stats.kv_usage * stats.num_blocks)
    counts = CellCounts(free=stats.num_blocks - num_used, used=num_used)
    return PoolCells(stats.num_blocks, stats.block_size, 1, b"", counts)


def _steps(snapshot: EngineSnapshot, received_s: float) -> list[dict[str, Any]]:
    """Return the steps with times on this process's clock: workers send only ages."""
    steps = [msgspec.structs.asdict(one) for one in snapshot.steps]
    return [{"at_s": round(received_s - one.pop("age_s"), 4), **one} for one in steps]


def _named(running: Iterable[RunningFigures], records: Iterable[RequestRecord]) -> list[RunningFigures]:
    """Replace the engine's request ids by the clients'."""
    names = {handle.request_id: shown_id(record) for record in records for handle in record.handles}
    replace = msgspec.structs.replace
    return [replace(one, request_id=names.get(one.request_id, one.request_id)) for one in running]


def _guessed(records: Iterable[RequestRecord]) -> list[RunningFigures]:
    """Return what this process knows of sequences that run elsewhere."""
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
    now_open = [request_line(record) for record, _ in list(open_requests.values())[-MAX_ENDED:] if record.model]
    return [*activity.timelines, *now_open][-MAX_ENDED:]


def _fleet(model: ModelEntry, totals: RequestTotals) -> dict[str, Any] | None:
    fleet = model.fleet_stats()
    if fleet is None:
        return None
    hit_rate = totals.num_cached_tokens / totals.num_prompt_tokens if totals.num_prompt_tokens else None
    return asdict(fleet) | {"hit_rate": hit_rate}
