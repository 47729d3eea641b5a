"""How far work on big files is, for the person who waits: bars on a terminal, lines elsewhere.

A bar is there from the first to the last byte of its work, and no longer than the block that began it. While there is
one, it keeps typed text from being echoed into it, and whatever is written to sys.stderr is written above it, by the
console that draws it. Nothing draws but progress itself: where nothing moves, nothing is written.
"""

import os
import sys
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from threading import RLock
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from rich.progress import Progress as Bars
    from rich.progress import TaskID

SECONDS_BETWEEN_LINES = 2.0
SECONDS_BETWEEN_PICTURES = 0.1
LOCAL_MODES = 3
"""Where `termios.tcgetattr` has them."""


class Progress(Protocol):
    """Called with what is being done and how far it is; may be called thousands of times."""

    def __call__(self, label: str, done_bytes: int, total_bytes: int) -> None: ...


def quiet(label: str, done_bytes: int, total_bytes: int) -> None:
    """Say nothing."""


class LinesOnStderr:
    """One line at the end of each piece of work, and at most one every two seconds before: fit for a log."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last_s = clock()
        self._ended = ""

    def __call__(self, label: str, done_bytes: int, total_bytes: int) -> None:
        now_s = self._clock()
        ended = done_bytes >= total_bytes
        if now_s - self._last_s < SECONDS_BETWEEN_LINES and not (ended and self._ended != label):
            return
        self._last_s = now_s
        self._ended = label if ended else ""
        print(f"{label}: {done_bytes / 1e6:,.0f} of {total_bytes / 1e6:,.0f} MB", file=sys.stderr)  # noqa: T201


class TerminalBars:
    """All bars of this process's terminal. Threads may report at once."""

    def __init__(self) -> None:
        self._lock = RLock()
        self._held = ExitStack()
        self._bars: Bars | None = None
        self._tasks: dict[str, TaskID] = {}
        self._drawn_s = 0.0

    def show(self, label: str, done_bytes: int, total_bytes: int) -> None:
        """Draw this bar as far as it is; at its last byte it goes."""
        with self._lock:
            if done_bytes >= total_bytes:
                self.end(label)
                return
            bars = self._bars = self._bars or self._opened()
            if label not in self._tasks:
                self._tasks[label] = bars.add_task(_shortened(label, bars.console.width), total=total_bytes)
            bars.update(self._tasks[label], completed=done_bytes, total=total_bytes)
            now_s = time.monotonic()
            if now_s - self._drawn_s >= SECONDS_BETWEEN_PICTURES:
                self._drawn_s = now_s
                bars.refresh()

    def end(self, label: str) -> None:
        """Take this bar away, if it is there; with the last of them the terminal is as it was."""
        with self._lock:
            task = self._tasks.pop(label, None)
            if task is None or self._bars is None:
                return
            self._bars.remove_task(task)
            if self._tasks:
                self._bars.refresh()
            else:
                self._bars = None
                self._held.close()

    def _opened(self) -> "Bars":
        """Drawn by us alone: a thread that redraws would write to the terminal while nothing happens."""
        from rich.console import Console
        from rich.progress import Progress as Bars

        console = Console(stderr=True, soft_wrap=True)
        self._held.enter_context(_without_echo())
        return self._held.enter_context(
            Bars(console=console, transient=True, auto_refresh=False, redirect_stdout=False)
        )


BARS = TerminalBars()
"""A process has one terminal."""


@contextmanager
def show_progress() -> Iterator[Progress]:
    """Bars on a terminal, which end with this block at the latest; lines on stderr elsewhere."""
    if not sys.stderr.isatty():
        yield LinesOnStderr()
        return
    begun: set[str] = set()

    def show(label: str, done_bytes: int, total_bytes: int) -> None:
        begun.add(label)
        BARS.show(label, done_bytes, total_bytes)

    try:
        yield show
    finally:
        for label in begun:
            BARS.end(label)


def _shortened(label: str, width: int) -> str:
    """Beside a bar of 40, a share and a time, on one line: a bar that breaks could not be taken away."""
    room = max(1, width - 58)
    return label if len(label) <= room else f"{label[: room - 1]}…"


@contextmanager
def _without_echo() -> Iterator[None]:
    """What is typed meanwhile is kept for the program that reads it, and not shown in the middle of a bar."""
    was_on = _echo(is_on=False)
    try:
        yield
    finally:
        if was_on:
            _echo(is_on=True)


def _echo(*, is_on: bool) -> bool:
    """Switch it, where this is the process in front: others are stopped for trying. Whether it was on before."""
    try:
        keyboard = sys.stdin.fileno()
        if os.tcgetpgrp(keyboard) != os.getpgrp():
            return False
        modes = termios.tcgetattr(keyboard)
        was_on = bool(modes[LOCAL_MODES] & termios.ECHO)
        modes[LOCAL_MODES] = modes[LOCAL_MODES] | termios.ECHO if is_on else modes[LOCAL_MODES] & ~termios.ECHO
        termios.tcsetattr(keyboard, termios.TCSANOW, modes)
    except (OSError, ValueError, AttributeError, termios.error):  # there is no keyboard
        return False
    return was_on
