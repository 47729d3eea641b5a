"""Subscribers of watch events, and how they are served: one snapshot per model, however many subscribers.

    engine ─► snapshot, about every 0.4 s ─► one event, encoded once ─► every subscriber reads the newest

The engine sends snapshots while there are subscribers. A slow subscriber misses events; none are queued. If no snapshot
arrives because a step is long or there is no worker, events are still sent, with the server's own state.
"""

import asyncio
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from time import monotonic

import msgspec

from quire.api.access.admission import Admission
from quire.api.http.errors import ApiError
from quire.api.http.limits import MAX_WATCHERS, WATCH_MAX_INTERVAL_S, WATCH_PERIOD_S, WATCH_RETRY_S
from quire.api.models.registry import ModelEntry
from quire.api.watch.activity import Activity
from quire.api.watch.watch_event import warnings_of, watch_event
from quire.client.engines.client import EngineClient
from quire.core.inspect.snapshots import EngineSnapshot


class Watchers:
    """All subscribers of all models. Used from one event loop."""

    def __init__(self, admission: Admission, activity: Activity) -> None:
        self.admission = admission
        self.activity = activity
        self._watches: dict[str, ModelWatch] = {}

    @property
    def num_subscribers(self) -> int:
        return sum(watch.num_subscribers for watch in self._watches.values())

    @contextmanager
    def subscription(self, model: ModelEntry) -> Iterator["ModelWatch"]:
        """Subscribe to a model's events. Raises ApiError if there are too many subscribers."""
        if self.num_subscribers >= MAX_WATCHERS:
            message = (
                f"expected at most {MAX_WATCHERS} subscribers, got one more; close a dashboard page or a "
                "`quire top`, or try again later"
            )
            raise ApiError(503, "too_many_watchers", message, retry_after_s=WATCH_RETRY_S)
        watch = self._watches.get(model.name)
        if watch is None:
            watch = self._watches[model.name] = ModelWatch(self, model, self._watches.keys())
        watch.num_subscribers += 1
        try:
            yield watch
        finally:
            watch.num_subscribers -= 1
            if not watch.num_subscribers:
                del self._watches[model.name]
                watch.end()


class ModelWatch:
    """The events of one model, from its first subscriber to its last."""

    def __init__(self, watchers: Watchers, model: ModelEntry, watched_models: Collection[str]) -> None:
        self._admission = watchers.admission
        self._activity = watchers.activity
        self._model = model
        self._watched_models = watched_models
        self.num_subscribers = 0
        self.number = 0
        """The number of the newest event."""
        self.is_over = False
        """Whether there will be no more events, because the server is shutting down."""
        self._event = b""
        self._warnings = {True: b"[]", False: b"[]"}
        """Encoded warnings; under True they include prompt lines, which are clients' text."""
        self._snapshot: tuple[EngineSnapshot, float] | None = None
        """The engine's latest snapshot, and when it arrived."""
        self._client: EngineClient | None = None
        self._has_snapshot = asyncio.Event()
        self._has_event = asyncio.Event()
        self._task = asyncio.create_task(self._run(), name="quire-watchers")

    def end(self) -> None:
        """Stop publishing; called when the last subscriber has left."""
        self._task.cancel()
        self._follow(None)

    async def wait_for_newer(self, number: int) -> None:
        """Wait for an event with a higher number, or for the end of the stream."""
        while self.number <= number and not self.is_over:
            await self._has_event.wait()

    def newest_event(self, num_seen_rows: int, *, includes_lines: bool = False) -> tuple[bytes, int]:
        """Return the newest event with the history rows after the first `num_seen_rows`, and the number of all rows.
        With `includes_lines`, warnings include prompt lines, which are clients' text."""
        activity = self._activity.of(self._model.name)
        num_new = min(activity.num_rows - num_seen_rows, len(activity.rows))
        rows = list(activity.rows)[len(activity.rows) - num_new :] if num_new else []
        suffix = b',"warnings":%b,"history":%b}' % (self._warnings[includes_lines], msgspec.json.encode(rows))
        return self._event[:-1] + suffix, activity.num_rows

    async def _run(self) -> None:
        while not self.is_over:
            self._follow(self._model.engine_client)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._has_snapshot.wait(), WATCH_MAX_INTERVAL_S)
            self._has_snapshot.clear()
            self._publish()

    def _follow(self, client: EngineClient | None) -> None:
        """Receive snapshots of this client. A model has a new client after it was unloaded and loaded again."""
        if client is self._client:
            return
        previous, self._client, self._snapshot = self._client, client, None
        if previous is not None:
            previous.unwatch()
        if client is not None:
            client.watch(self._store_snapshot, WATCH_PERIOD_S)

    def _store_snapshot(self, snapshot: EngineSnapshot) -> None:
        self._snapshot = snapshot, monotonic()
        self._has_snapshot.set()

    def _publish(self) -> None:
        snapshot = self._snapshot
        if snapshot is not None and not self._model.is_ready:
            snapshot = None  # it is from a worker that has ended
        event = watch_event(self._admission, self._activity, self._model, snapshot, self._watched_models)
        self._event = msgspec.json.encode(event)
        now_s = monotonic()
        for includes_lines in self._warnings:
            warnings = warnings_of(self._admission, now_s, includes_lines=includes_lines)
            self._warnings[includes_lines] = msgspec.json.encode(warnings)
        if self._snapshot is not None:  # each step is sent only once
            self._snapshot = msgspec.structs.replace(self._snapshot[0], steps=()), self._snapshot[1]
        self.number += 1
        self.is_over = self._admission.is_draining and not self._admission.open_requests
        event_sent, self._has_event = self._has_event, asyncio.Event()
        event_sent.set()
