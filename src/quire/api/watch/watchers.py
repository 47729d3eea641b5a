"""The watchers, and what they receive: one snapshot of each model's engine, however many readers there are.

    engine ─► snapshot, about every 0.4 s ─► one event, encoded once ─► every reader takes the newest

With the first reader the engine begins to send snapshots, and with the last one it ends. A slow reader misses events
and never queues any. Where no snapshot comes, because a step is long or there is no worker, events are sent all the
same, with the server's own state.
"""

import asyncio
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from time import monotonic
from typing import Protocol

import msgspec

from quire.api.http.errors import ApiError
from quire.api.http.limits import MAX_WATCHERS, WATCH_BEAT_S, WATCH_PERIOD_S, WATCH_RETRY_S
from quire.api.models.registry import ModelEntry
from quire.api.watch.watch_event import WatchedServer, warnings_of, watch_event
from quire.client.engines.client import EngineClient
from quire.core.inspect.snapshots import EngineSnapshot


class ServerWithWatchers(WatchedServer, Protocol):
    """A server that may be watched."""

    watchers: "Watchers"


class Watchers:
    """All readers of all models. For one event loop."""

    def __init__(self, server: WatchedServer) -> None:
        self._server = server
        self._watched: dict[str, ModelWatch] = {}

    @property
    def num_readers(self) -> int:
        return sum(one.num_readers for one in self._watched.values())

    @contextmanager
    def reading(self, model: ModelEntry) -> Iterator["ModelWatch"]:
        """Watch a model. Raises ApiError if there are too many watchers."""
        if self.num_readers >= MAX_WATCHERS:
            message = (
                f"expected at most {MAX_WATCHERS} watchers, {self.num_readers} are connected; "
                "close another page, or try again later"
            )
            raise ApiError(503, "too_many_watchers", message, retry_after_s=WATCH_RETRY_S)
        watch = self._watched.get(model.name)
        if watch is None:
            watch = self._watched[model.name] = ModelWatch(self._server, model, self._watched.keys())
            watch.begin()
        watch.num_readers += 1
        try:
            yield watch
        finally:
            watch.num_readers -= 1
            if not watch.num_readers:
                del self._watched[model.name]
                watch.end()


class ModelWatch:
    """One model, from its first reader to its last."""

    def __init__(self, server: WatchedServer, model: ModelEntry, watched: Collection[str]) -> None:
        self._server = server
        self._model = model
        self._watched = watched
        self.num_readers = 0
        self.number = 0
        """Of the newest event."""
        self.is_over = False
        """There will be no more events: the server ends."""
        self._event = b""
        self._warnings = {True: b"[]", False: b"[]"}
        """With lines, and without."""
        self._shown: tuple[EngineSnapshot, float] | None = None
        self._client: EngineClient | None = None
        self._came = asyncio.Event()
        self._published = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """The first reader came."""
        self._task = asyncio.create_task(self._run(), name="quire-watchers")

    def end(self) -> None:
        """The last reader left."""
        if self._task is not None:
            self._task.cancel()
        self._follow(None)

    async def newer_than(self, number: int) -> None:
        """Wait until there is an event after this one, or there will be none."""
        while self.number <= number and not self.is_over:
            await self._published.wait()

    def event_after(self, num_rows: int, *, reads_lines: bool = False) -> tuple[bytes, int]:
        """The newest event, with the history's rows beyond the first so many; and how many there are now. With
        `reads_lines` clients' lines are shown."""
        activity = self._server.activity.of(self._model.name)
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
        """A model may be unloaded and come back as another client of another engine."""
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
            shown = None  # of a worker that is no more
        self._event = msgspec.json.encode(watch_event(self._server, self._model, shown, self._watched))
        now_s = monotonic()
        for reads_lines in self._warnings:
            warnings = warnings_of(self._server, now_s, reads_lines=reads_lines)
            self._warnings[reads_lines] = msgspec.json.encode(warnings)
        if self._shown is not None:  # steps are sent once
            self._shown = msgspec.structs.replace(self._shown[0], steps=()), self._shown[1]
        self.number += 1
        self.is_over = self._server.is_draining and not self._server.open_requests
        waiting, self._published = self._published, asyncio.Event()
        waiting.set()
