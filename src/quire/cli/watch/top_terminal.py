"""The terminal of `quire top`: a screen drawn again and again, one key at a time; or lines, where it is none."""

import os
import select
import sys
import termios
import tty
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic, strftime

import typer
from rich.console import Console, Group
from rich.live import Live

from quire.cli.shared.columns import plain
from quire.cli.watch.top_figures import TopFigures, plain_line
from quire.cli.watch.top_glyphs import Glyphs
from quire.cli.watch.top_picture import Frame, picture
from quire.cli.watch.top_watcher import TopWatcher

LOOK_S = 0.25
SHOWN_ONCE_ROWS = 40
KEYS = "q ends   m next model"


def print_picture(figures: TopFigures, console: Console) -> None:
    """As it is now, and no longer than it must be."""
    frame = Frame(console.width, SHOWN_ONCE_ROWS, Glyphs.for_encoding(console.encoding))
    for line in picture(figures, frame):
        console.print(line, no_wrap=True, overflow="crop")


def show_in_terminal(watcher: TopWatcher, console: Console) -> None:
    """Draw it again and again on a screen of its own, until somebody types q."""
    glyphs = Glyphs.for_encoding(console.encoding)

    def draw(figures: TopFigures, trouble: str | None) -> None:
        width, height = console.size
        live.update(Group(*picture(figures, Frame(width, height, glyphs), trouble, KEYS)), refresh=True)

    with typed_keys() as typed, Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            watcher.look(draw)
            given = typed(LOOK_S)
            if given in ("q", "Q"):
                return
            if given in ("m", "M", "\t"):
                watcher.next_model()


@contextmanager
def typed_keys() -> "Iterator[Typed]":
    """A question for the key that is typed within so many seconds; without a keyboard none ever is."""
    if not sys.stdin.isatty():
        yield Typed(None)
        return
    keyboard = sys.stdin.fileno()
    before = termios.tcgetattr(keyboard)
    try:
        tty.setcbreak(keyboard)
        yield Typed(keyboard)
    finally:
        termios.tcsetattr(keyboard, termios.TCSADRAIN, before)


class Typed:
    """The keyboard, one key at a time."""

    def __init__(self, keyboard: int | None) -> None:
        self._keyboard = keyboard

    def __call__(self, timeout_s: float) -> str:
        """The key that is typed within so long; nothing: none was."""
        given = [] if self._keyboard is None else [self._keyboard]
        ready, _, _ = select.select(given, [], [], timeout_s)
        if not ready or self._keyboard is None:
            return ""
        data = os.read(self._keyboard, 1)
        if not data:
            self._keyboard = None  # it is gone; Ctrl-C and signals still end this
        return data.decode("ascii", "replace")


def write_lines(watcher: TopWatcher, every_s: float) -> None:
    """A line now and then, whole and plain; of trouble once, on stderr."""
    due_s, told = 0.0, ""

    def write(figures: TopFigures, trouble: str | None) -> None:
        nonlocal due_s, told
        if trouble is not None:
            if told != "gone":
                typer.echo(f"{plain(trouble)}; asking again", err=True)
            told = "gone"
        elif figures.seen is not None and monotonic() >= due_s:
            if told == "gone":
                typer.echo("the server is there again", err=True)
            told, due_s = "seen", monotonic() + every_s
            typer.echo(f"{strftime('%H:%M:%S')} {plain(plain_line(figures))}")

    while True:
        watcher.look(write)
        watcher.wait(LOOK_S)
