"""Watch a server in a separate thread and reconnect as needed, so that the terminal never waits for the network."""

import threading
from collections.abc import Callable
from contextlib import closing

from quire.cli.watch.top_figures import TopMetrics
from quire.cli.watch.watch_source import WatchError, WatchSource
from quire.cli.watch.watched_state import WatchedModel, read_snapshot
from quire.errors import ConfigError, QuireError

RETRY_S = 1.0
MAX_EVENTS = 6
"""Maximum number of events that `fetch_once` reads, because the first events may lack the engine's block pool."""


class TopWatcher:
    """Watches a server: its current metrics, or the error that prevents newer metrics."""

    def __init__(self, source: WatchSource, model: str | None = None) -> None:
        self._source = source
        self._model = model
        self._metrics = TopMetrics(source.url)
        self._lock = threading.Lock()
        self._is_stopped = threading.Event()
        self._has_update = threading.Event()
        self._is_model_changed = False
        self._message: str | None = None
        self._fatal_error: QuireError | None = None
        self._thread = threading.Thread(target=self._watch, name="quire-top-watch", daemon=True)

    def __enter__(self) -> "TopWatcher":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop the thread without joining it: it owns only a connection, which is closed when the process exits."""
        self._is_stopped.set()

    def wait(self, timeout_s: float) -> bool:
        """Wait for a new snapshot or error; returns False on timeout."""
        has_update = self._has_update.wait(timeout_s)
        self._has_update.clear()
        return has_update

    def show(self, draw: Callable[[TopMetrics, str | None], None]) -> None:
        """Call `draw` with the current metrics and error. Raises the server's error if it rejected the request."""
        with self._lock:
            if self._fatal_error is not None:
                raise self._fatal_error
            draw(self._metrics, self._message)

    def next_model(self) -> None:
        """Watch the server's next model."""
        with self._lock:
            snapshot = self._metrics.snapshot
            if snapshot is None or len(snapshot.models) < 2:
                return
            self._model = _next_name(snapshot.model, snapshot.models)
            self._is_model_changed = True

    def _watch(self) -> None:
        while not self._is_stopped.is_set():
            try:
                self._read_stream()
            except WatchError as error:
                self._report(message=str(error))
                if self._metrics.snapshot is None and not self._is_stopped.is_set():
                    self._report(fatal_error=_unreachable(error))
                    return
            except QuireError as error:
                self._report(fatal_error=error)
                return
            if not self._is_model_changed:
                self._is_stopped.wait(RETRY_S)

    def _read_stream(self) -> None:
        """Read snapshots from one connection until it ends or another model is selected."""
        with self._lock:
            model, self._is_model_changed = self._model, False
        with closing(self._source.snapshots(model)) as snapshots:
            for data in snapshots:
                snapshot = read_snapshot(data)
                with self._lock:
                    if self._is_stopped.is_set() or self._is_model_changed:
                        return
                    self._metrics.add(snapshot)
                    self._message = None
                self._has_update.set()

    def _report(self, message: str | None = None, fatal_error: QuireError | None = None) -> None:
        with self._lock:
            self._message, self._fatal_error = message, fatal_error
        self._has_update.set()


def _next_name(name: str, models: tuple[WatchedModel, ...]) -> str:
    names = [model.name for model in models]
    return names[(names.index(name) + 1) % len(names)] if name in names else names[0]


def fetch_once(source: WatchSource, model: str | None) -> TopMetrics:
    """Fetch metrics once. Raises ConfigError if the server is unreachable, RequestError if it rejects the request."""
    metrics = TopMetrics(source.url)
    try:
        with closing(source.snapshots(model)) as snapshots:
            for _, data in zip(range(MAX_EVENTS), snapshots, strict=False):
                metrics.add(read_snapshot(data))
                if metrics.snapshot is not None and metrics.snapshot.shown_pool is not None:
                    break
    except WatchError as error:
        if metrics.snapshot is None:
            raise _unreachable(error) from error
    return metrics


def _unreachable(error: WatchError) -> ConfigError:
    return ConfigError(f"{error}; start a server with: quire serve MODEL", code="server_unreachable")
