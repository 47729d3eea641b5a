"""Progress of downloads and conversions: bars on a terminal, lines otherwise.

A bar is visible from the first to the last byte of its task, and at most until its `with` block ends. While a bar is
visible, terminal echo is off, and text written to sys.stderr appears above the bar. Bars are redrawn only when progress
is reported.
"""

import sys
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from threading import RLock
from typing import TYPE_CHECKING, Protocol

from quire.terminal import without_mode

if TYPE_CHECKING:
    from rich.progress import Progress as Bars
    from rich.progress import TaskID

SECONDS_BETWEEN_LINES = 2.0
SECONDS_BETWEEN_REDRAWS = 0.1


class Progress(Protocol):
    """Callback: reports a task's label and progress, up to thousands of times per task."""

    def __call__(self, label: str, done_bytes: int, total_bytes: int) -> None: ...


def quiet(label: str, done_bytes: int, total_bytes: int) -> None:
    """Ignore the progress: the callback of programs that show none."""


class LinesOnStderr:
    """Progress lines for logs: at most one every two seconds, and one at the end of each task."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._printed_s = clock()
        self._completed_label = ""

    def __call__(self, label: str, done_bytes: int, total_bytes: int) -> None:
        now_s = self._clock()
        is_complete = done_bytes >= total_bytes
        if now_s - self._printed_s < SECONDS_BETWEEN_LINES and not (is_complete and self._completed_label != label):
            return
        self._printed_s = now_s
        self._completed_label = label if is_complete else ""
        print(f"{label}: {done_bytes / 1e6:,.0f} of {total_bytes / 1e6:,.0f} MB", file=sys.stderr)  # noqa: T201


class TerminalBars:
    """All progress bars on this process's terminal. Thread-safe."""

    def __init__(self) -> None:
        self._lock = RLock()
        self._terminal_settings = ExitStack()
        self._bars: Bars | None = None
        self._tasks: dict[str, TaskID] = {}
        self._redrawn_s = 0.0

    def show(self, label: str, done_bytes: int, total_bytes: int) -> None:
        """Update a task's bar; remove it when the task is complete."""
        with self._lock:
            if done_bytes >= total_bytes:
                self.end(label)
                return
            bars = self._bars = self._bars or self._open_bars()
            if label not in self._tasks:
                self._tasks[label] = bars.add_task(_fit_label(label, bars.console.width), total=total_bytes)
            bars.update(self._tasks[label], completed=done_bytes, total=total_bytes)
            now_s = time.monotonic()
            if now_s - self._redrawn_s >= SECONDS_BETWEEN_REDRAWS:
                self._redrawn_s = now_s
                bars.refresh()

    def end(self, label: str) -> None:
        """Remove a task's bar if it exists; restore the terminal after the last bar."""
        with self._lock:
            task = self._tasks.pop(label, None)
            if task is None or self._bars is None:
                return
            self._bars.remove_task(task)
            if self._tasks:
                self._bars.refresh()
            else:
                self._bars = None
                self._terminal_settings.close()

    def _open_bars(self) -> "Bars":
        """Open the bar display without a refresh thread, which would write to the terminal without progress."""
        from rich.console import Console
        from rich.progress import Progress as Bars

        console = Console(stderr=True, soft_wrap=True)
        # Without echo, typed text stays in the input buffer and does not appear inside a bar.
        self._terminal_settings.enter_context(without_mode(sys.stdin, termios.ECHO))
        return self._terminal_settings.enter_context(
            Bars(console=console, transient=True, auto_refresh=False, redirect_stdout=False)
        )


BARS = TerminalBars()
"""The bars of this process's terminal."""


@contextmanager
def show_progress() -> Iterator[Progress]:
    """Yield a progress callback: bars on a terminal, removed at the end of the block; otherwise lines on stderr."""
    if not sys.stderr.isatty():
        yield LinesOnStderr()
        return
    labels: set[str] = set()

    def show_bar(label: str, done_bytes: int, total_bytes: int) -> None:
        labels.add(label)
        BARS.show(label, done_bytes, total_bytes)

    try:
        yield show_bar
    finally:
        for label in labels:
            BARS.end(label)


def _fit_label(label: str, width: int) -> str:
    """Shorten a label so that it fits on one line with bar, percentage and time: a wrapped bar cannot be erased."""
    max_chars = max(1, width - 58)
    return label if len(label) <= max_chars else f"{label[: max_chars - 1]}…"
