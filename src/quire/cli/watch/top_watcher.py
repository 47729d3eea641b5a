"""Watch a server in a separate thread and reconnect as needed, so that the terminal never waits for the network."""

import threading
from collections.abc import Callable
from contextlib import closing

from quire.cli.watch.top_figures import TopFigures
from quire.cli.watch.watch_source import WatchGoneError, WatchSource
from quire.cli.watch.watched_state import SeenModel, read_snapshot
from quire.errors import ConfigError, QuireError

RETRY_S = 1.0
EVENTS_UNTIL_WHOLE = 6
"""Maximum number of events that `seen_once` reads, because the first events may lack the engine's block pool."""


class TopWatcher:
    """Watches a server: its current metrics, or the error that prevents newer metrics."""

    def __init__(self, source: WatchSource, model: str | None = None) -> None:
        self._source = source
        self._model = model
        self._figures = TopFigures(source.url)
        self._lock = threading.Lock()
        self._is_over = threading.Event()
        self._is_news = threading.Event()
        self._is_other_wanted = False
        self._trouble: str | None = None
        self._refused: QuireError | None = None
        self._thread = threading.Thread(target=self._watch, name="quire-top-watch", daemon=True)

    def __enter__(self) -> "TopWatcher":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop the thread without joining it: it owns only a connection, which is closed when the process exits."""
        self._is_over.set()

    def wait(self, timeout_s: float) -> bool:
        """Wait for a new snapshot or error; returns False on timeout."""
        is_news = self._is_news.wait(timeout_s)
        self._is_news.clear()
        return is_news

    def look(self, show: Callable[[TopFigures, str | None], None]) -> None:
        """Call `show` with the current metrics and error. Raises the server's error if it rejected the request."""
        with self._lock:
            if self._refused is not None:
                raise self._refused
            show(self._figures, self._trouble)

    def next_model(self) -> None:
        """Watch the server's next model."""
        with self._lock:
            seen = self._figures.seen
            if seen is None or len(seen.models) < 2:
                return
            self._model = _behind(seen.model, seen.models)
            self._is_other_wanted = True

    def _watch(self) -> None:
        while not self._is_over.is_set():
            try:
                self._read_stream()
            except WatchGoneError as error:
                self._report(trouble=str(error))
                if self._figures.seen is None and not self._is_over.is_set():
                    self._report(refused=_unreachable(error))
                    return
            except QuireError as error:
                self._report(refused=error)
                return
            if not self._is_other_wanted:
                self._is_over.wait(RETRY_S)

    def _read_stream(self) -> None:
        """Read snapshots from one connection until it ends or another model is selected."""
        with self._lock:
            model, self._is_other_wanted = self._model, False
        with closing(self._source.snapshots(model)) as snapshots:
            for data in snapshots:
                snapshot = read_snapshot(data)
                with self._lock:
                    if self._is_over.is_set() or self._is_other_wanted:
                        return
                    self._figures.take(snapshot)
                    self._trouble = None
                self._is_news.set()

    def _report(self, trouble: str | None = None, refused: QuireError | None = None) -> None:
        with self._lock:
            self._trouble, self._refused = trouble, refused
        self._is_news.set()


def _behind(name: str, models: tuple[SeenModel, ...]) -> str:
    names = [model.name for model in models]
    return names[(names.index(name) + 1) % len(names)] if name in names else names[0]


def seen_once(source: WatchSource, model: str | None) -> TopFigures:
    """Fetch metrics once. Raises ConfigError if the server is unreachable, RequestError if it rejects the request."""
    figures = TopFigures(source.url)
    try:
        with closing(source.snapshots(model)) as snapshots:
            for _, data in zip(range(EVENTS_UNTIL_WHOLE), snapshots, strict=False):
                figures.take(read_snapshot(data))
                if figures.seen is not None and figures.seen.shown_pool is not None:
                    break
    except WatchGoneError as error:
        if figures.seen is None:
            raise _unreachable(error) from error
    return figures


def _unreachable(error: WatchGoneError) -> ConfigError:
    return ConfigError(f"{error}; start a server with: quire serve MODEL", code="server_unreachable")
