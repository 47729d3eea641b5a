"""One event of the stream: the engine's snapshot, and the server's requests. Bounded, and without text.

docs/reference/watch.md has the format.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict
from time import monotonic
from typing import Any, Protocol

import msgspec

from quire.api.http.request_record import RequestRecord
from quire.api.models.registry import ModelEntry, Models
from quire.api.watch.activity import MAX_ENDED, Activity, OpenRequests, RequestTotals
from quire.api.watch.timeline import request_line, shown_id
from quire.client.prefix.prefix_guard import PrefixGuard
from quire.client.prefix.reuse_log import ReuseLog
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
"""Classes and tenants that wait, the longest queues."""


class WatchedServer(Protocol):
    """The server that events describe."""

    models: Models
    open_requests: dict[str, tuple[RequestRecord, Any]]
    activity: Activity
    reuse_log: ReuseLog
    prefix_guard: PrefixGuard
    is_draining: bool


def warnings_of(server: WatchedServer, now_s: float, *, reads_lines: bool) -> list[dict[str, Any]]:
    """Of the prefix guard. Lines are clients' text: not for all watchers."""
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
    server: WatchedServer, model: ModelEntry, shown: tuple[EngineSnapshot, float] | None, watched: Iterable[str]
) -> dict[str, Any]:
    """All but the history and the warnings. `shown`: the latest snapshot and when it came, if there is one; its steps
    are included."""
    now_s, open_requests, is_watched = monotonic(), server.open_requests, frozenset(watched)
    records = server.activity.open_of(model.name)
    totals = server.activity.of(model.name).totals(records)
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
        "requests": _timelines(server.activity, open_requests),
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
    """Of its blocks only the number is known."""
    stats = model.stats()
    if stats is None or not stats.num_blocks:
        return PoolCells()
    num_used = round(stats.kv_usage * stats.num_blocks)
    counts = CellCounts(free=stats.num_blocks - num_used, used=num_used)
    return PoolCells(stats.num_blocks, stats.block_size, 1, b"", counts)


def _steps(snapshot: EngineSnapshot, received_s: float) -> list[dict[str, Any]]:
    """On the clock of this process: workers only send how long ago a step was."""
    return [
        {
            "step": one.step,
            "at_s": round(received_s - one.age_s, 4),
            "prompt_tokens": one.prompt_tokens,
            "output_tokens": one.output_tokens,
            "rows": one.rows,
            "ms": one.ms,
        }
        for one in snapshot.steps
    ]


def _named(running: Iterable[RunningFigures], records: Iterable[RequestRecord]) -> list[RunningFigures]:
    """Under the clients' request ids."""
    names = {handle.request_id: shown_id(record) for record in records for handle in record.handles}
    replace = msgspec.structs.replace
    return [replace(one, request_id=names.get(one.request_id, one.request_id)) for one in running]


def _guessed(records: Iterable[RequestRecord]) -> list[RunningFigures]:
    """Figures known here of sequences that run elsewhere."""
    return [
        RunningFigures(
            shown_id(record),
            record.tenant,
            record.priority,
            "answer" if record.num_output_tokens else "prompt",
            record.num_prompt_tokens + record.num_output_tokens - 1
            if record.num_output_tokens
            else record.num_cached_tokens,
            record.num_prompt_tokens + record.num_output_tokens,
            record.num_prompt_tokens,
            record.num_cached_tokens,
            record.num_output_tokens,
        )
        for record in records
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
    """The last of those that have ended, and those that are open: the latest of them all."""
    now_open = [request_line(record) for record, _ in list(open_requests.values())[-MAX_ENDED:] if record.model]
    ended = list(activity.timelines)
    return [
        *ended[len(ended) - (MAX_ENDED - len(now_open)) if len(now_open) + len(ended) > MAX_ENDED else 0 :],
        *now_open,
    ]


def _fleet(model: ModelEntry, totals: RequestTotals) -> dict[str, Any] | None:
    fleet = model.fleet_stats()
    if fleet is None:
        return None
    hit_rate = totals.num_cached_tokens / totals.num_prompt_tokens if totals.num_prompt_tokens else None
    return asdict(fleet) | {"hit_rate": hit_rate}
