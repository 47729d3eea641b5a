"""How long work on big files is told to whoever waits for it."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

SECONDS_BETWEEN_LINES = 2.0


class Progress(Protocol):
    """Called with what is being done and how far it is; may be called thousands of times."""

    def __call__(self, label: str, done_bytes: int, total_bytes: int) -> None:
        """Tell how far it is."""


def quiet(label: str, done_bytes: int, total_bytes: int) -> None:
    """Say nothing."""


class LinesOnStderr:
    """One line at the end of each piece of work, and at most one every two seconds before: fit for a log."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last_s = clock()
        self._ended = ""

    def __call__(self, label: str, done_bytes: int, total_bytes: int) -> None:
        """Print a line, or not yet."""
        now_s = self._clock()
        ended = done_bytes >= total_bytes
        if now_s - self._last_s < SECONDS_BETWEEN_LINES and not (ended and self._ended != label):
            return
        self._last_s = now_s
        self._ended = label if ended else ""
        print(f"{label}: {done_bytes / 1e6:,.0f} of {total_bytes / 1e6:,.0f} MB", file=sys.stderr)  # noqa: T201


@contextmanager
def show_progress() -> Iterator[Progress]:
    """A bar on a terminal, lines on stderr elsewhere."""
    if not sys.stderr.isatty():
        yield LinesOnStderr()
        return
    from rich.console import Console
    from rich.progress import Progress as Bar
    from rich.progress import TaskID

    with Bar(console=Console(stderr=True), transient=True) as bar:
        tasks: dict[str, TaskID] = {}

        def show(label: str, done_bytes: int, total_bytes: int) -> None:
            if label not in tasks:
                tasks[label] = bar.add_task(label, total=total_bytes)
            bar.update(tasks[label], completed=done_bytes, total=total_bytes)

        yield show
