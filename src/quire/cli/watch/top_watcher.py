"""Watches a server in a thread of its own, again and again, so that a terminal never waits for a network."""

import threading
from collections.abc import Callable
from contextlib import closing

from quire.cli.watch.top_figures import TopFigures
from quire.cli.watch.watch_source import WatchGoneError, WatchSource
from quire.cli.watch.watched_state import SeenModel, read_snapshot
from quire.errors import ConfigError, QuireError

ASK_AGAIN_S = 1.0
EVENTS_UNTIL_WHOLE = 6
"""So many are read at most by who wants one: the first may come before the engine has shown its pool."""


class TopWatcher:
    """A server's figures as they are now, and what stands in the way of newer ones."""

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
        """Nobody waits for the thread: it holds nothing but a connection, which ends with the process."""
        self._is_over.set()

    def wait(self, timeout_s: float) -> bool:
        """Until there is something new, or so long; whether there is."""
        is_news = self._is_news.wait(timeout_s)
        self._is_news.clear()
        return is_news

    def look(self, show: Callable[[TopFigures, str | None], None]) -> None:
        """Show what is known. Raises what the server refused with."""
        with self._lock:
            if self._refused is not None:
                raise self._refused
            show(self._figures, self._trouble)

    def next_model(self) -> None:
        """Watch the model behind this one."""
        with self._lock:
            seen = self._figures.seen
            if seen is None or len(seen.models) < 2:
                return
            self._model = _behind(seen.model, seen.models)
            self._is_other_wanted = True

    def _watch(self) -> None:
        while not self._is_over.is_set():
            try:
                self._hear()
            except WatchGoneError as error:
                self._tell(trouble=str(error))
                if self._figures.seen is None and not self._is_over.is_set():
                    self._tell(refused=ConfigError(f"{error}; start a server with: quire serve MODEL"))
                    return
            except QuireError as error:
                self._tell(refused=error)
                return
            if not self._is_other_wanted:
                self._is_over.wait(ASK_AGAIN_S)

    def _hear(self) -> None:
        """One connection, until it ends or another model is wanted."""
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

    def _tell(self, trouble: str | None = None, refused: QuireError | None = None) -> None:
        with self._lock:
            self._trouble, self._refused = trouble, refused
        self._is_news.set()


def _behind(name: str, models: tuple[SeenModel, ...]) -> str:
    names = [model.name for model in models]
    return names[(names.index(name) + 1) % len(names)] if name in names else names[0]


def seen_once(source: WatchSource, model: str | None) -> TopFigures:
    """A server as it is now. Raises ConfigError if it cannot be seen, RequestError if it refuses."""
    figures = TopFigures(source.url)
    try:
        with closing(source.snapshots(model)) as snapshots:
            for _, data in zip(range(EVENTS_UNTIL_WHOLE), snapshots, strict=False):
                figures.take(read_snapshot(data))
                if figures.seen is not None and figures.seen.pool is not None and figures.seen.pool.is_shown:
                    break
    except WatchGoneError as error:
        if figures.seen is None:
            raise ConfigError(f"{error}; start a server with: quire serve MODEL") from error
    return figures
