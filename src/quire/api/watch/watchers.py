"""Subscribers of watch events, and how they are served: one snapshot per model, however many subscribers.

    engine ─► snapshot, about every 0.4 s ─► one event, encoded once ─► every subscriber reads the newest

The engine sends snapshots from the first subscriber's connect to the last one's disconnect. A slow subscriber misses
events; none are queued. If no snapshot arrives because a step is long or there is no worker, events are still sent,
with the server's own state.
"""

import asyncio
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from time import monotonic

import msgspec

from quire.api.access.admission import Admission
from quire.api.http.errors import ApiError
from quire.api.http.limits import MAX_WATCHERS, WATCH_BEAT_S, WATCH_PERIOD_S, WATCH_RETRY_S
from quire.api.models.registry import ModelEntry
from quire.api.watch.activity import Activity
from quire.api.watch.watch_event import warnings_of, watch_event
from quire.client.engines.client import EngineClient
from quire.core.inspect.snapshots import EngineSnapshot


class Watchers:
    """All subscribers of all models. For one event loop."""

    def __init__(self, server: Admission, activity: Activity) -> None:
        self.server = server
        self.activity = activity
        self._watched: dict[str, ModelWatch] = {}

    @property
    def num_readers(self) -> int:
        return sum(one.num_readers for one in self._watched.values())

    @contextmanager
    def reading(self, model: ModelEntry) -> Iterator["ModelWatch"]:
        """Subscribe to a model's events. Raises ApiError if there are too many subscribers."""
        if self.num_readers >= MAX_WATCHERS:
            message = (
                f"expected at most {MAX_WATCHERS} watchers, {self.num_readers} are connected; "
                "close another page, or try again later"
            )
            raise ApiError(503, "too_many_watchers", message, retry_after_s=WATCH_RETRY_S)
        watch = self._watched.get(model.name)
        if watch is None:
            watch = self._watched[model.name] = ModelWatch(self, model, self._watched.keys())
        watch.num_readers += 1
        try:
            yield watch
        finally:
            watch.num_readers -= 1
            if not watch.num_readers:
                del self._watched[model.name]
                watch.end()


class ModelWatch:
    """The events of one model, from its first subscriber to its last."""

    def __init__(self, watchers: Watchers, model: ModelEntry, watched: Collection[str]) -> None:
        self._server = watchers.server
        self._activity = watchers.activity
        self._model = model
        self._watched = watched
        self.num_readers = 0
        self.number = 0
        """The number of the newest event."""
        self.is_over = False
        """No more events will come, because the server ends."""
        self._event = b""
        self._warnings = {True: b"[]", False: b"[]"}
        """Encoded warnings, by whether lines of clients' text are included."""
        self._shown: tuple[EngineSnapshot, float] | None = None
        self._client: EngineClient | None = None
        self._came = asyncio.Event()
        self._published = asyncio.Event()
        self._task = asyncio.create_task(self._run(), name="quire-watchers")

    def end(self) -> None:
        """Stop after the last subscriber left."""
        self._task.cancel()
        self._follow(None)

    async def newer_than(self, number: int) -> None:
        """Wait until there is an event after this number, or there will be none."""
        while self.number <= number and not self.is_over:
            await self._published.wait()

    def event_after(self, num_rows: int, *, reads_lines: bool = False) -> tuple[bytes, int]:
        """Return the newest event with the history rows after the first `num_rows`, and the number of rows now. With
        `reads_lines`, warnings include lines of clients' text."""
        activity = self._activity.of(self._model.name)
        num_new = min(activity.num_rows - num_rows, len(activity.rows))
        rows = list(activity.rows)[len(activity.rows) - num_new :] if num_new else []
        own = b',"warnings":%b,"history":%b}' % (self._warnings[reads_lines], msgspec.json.encode(rows))
        return self._event[:-1] + own, activity.num_rows

    async def _run(self) -> None:
        while not self.is_over:
            self._follow(self._model.engine_client)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._came.wait(), WATCH_BEAT_S)
            self._came.clear()
            self._publish()

    def _follow(self, client: EngineClient | None) -> None:
        """Watch this client. A model that was unloaded and loaded again has another client."""
        if client is self._client:
            return
        before, self._client, self._shown = self._client, client, None
        if before is not None:
            before.unwatch()
        if client is not None:
            client.watch(self._show, WATCH_PERIOD_S)

    def _show(self, snapshot: EngineSnapshot) -> None:
        self._shown = snapshot, monotonic()
        self._came.set()

    def _publish(self) -> None:
        shown = self._shown
        if shown is not None and not self._model.is_ready:
            shown = None  # from a worker that has ended
        event = watch_event(self._server, self._activity, self._model, shown, self._watched)
        self._event = msgspec.json.encode(event)
        now_s = monotonic()
        for reads_lines in self._warnings:
            warnings = warnings_of(self._server, now_s, reads_lines=reads_lines)
            self._warnings[reads_lines] = msgspec.json.encode(warnings)
        if self._shown is not None:  # each step is sent only once
            self._shown = msgspec.structs.replace(self._shown[0], steps=()), self._shown[1]
        self.number += 1
        self.is_over = self._server.is_draining and not self._server.open_requests
        waiting, self._published = self._published, asyncio.Event()
        waiting.set()
