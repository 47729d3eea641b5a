"""Terminal output of `quire top`: a full screen with key bindings, or plain lines if stdout is not a terminal."""

import os
import select
import sys
import termios
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic, strftime

import typer
from rich.console import Console, Group
from rich.live import Live

from quire.cli.shared.columns import plain
from quire.cli.watch.top_figures import TopMetrics, plain_line
from quire.cli.watch.top_glyphs import Glyphs
from quire.cli.watch.top_picture import Frame, screen_lines
from quire.cli.watch.top_watcher import TopWatcher

POLL_S = 0.25
ROWS_WITHOUT_TERMINAL = 40
KEYS = "q quit   m next model"


def print_screen(metrics: TopMetrics, console: Console) -> None:
    """Print the current screen once."""
    frame = Frame(console.width, ROWS_WITHOUT_TERMINAL, Glyphs.for_encoding(console.encoding))
    for line in screen_lines(metrics, frame):
        console.print(line, no_wrap=True, overflow="crop")


def show_in_terminal(watcher: TopWatcher, console: Console) -> None:
    """Draw on the full screen until the user types q."""
    glyphs = Glyphs.for_encoding(console.encoding)

    def draw(metrics: TopMetrics, error: str | None) -> None:
        width, height = console.size
        live.update(Group(*screen_lines(metrics, Frame(width, height, glyphs), error, KEYS)), refresh=True)

    with typed_keys() as read_key, Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            watcher.show(draw)
            key = read_key(POLL_S)
            if key in ("q", "Q"):
                return
            if key in ("m", "M", "\t"):
                watcher.next_model()


@contextmanager
def typed_keys() -> Iterator[Callable[[float], str]]:
    """Yield a function that returns the next key, or "" on timeout; without a terminal on stdin it always times out."""
    keyboards = [sys.stdin.fileno()] if sys.stdin.isatty() else []

    def read_key(timeout_s: float) -> str:
        ready, _, _ = select.select(keyboards, [], [], timeout_s)
        data = os.read(ready[0], 1) if ready else b""
        if ready and not data:
            keyboards.clear()  # stdin was closed; Ctrl-C and signals still end the program
        return data.decode("ascii", "replace")

    old_modes = [(keyboard, termios.tcgetattr(keyboard)) for keyboard in keyboards]
    try:
        for keyboard in keyboards:
            tty.setcbreak(keyboard)
        yield read_key
    finally:
        for keyboard, modes in old_modes:
            termios.tcsetattr(keyboard, termios.TCSADRAIN, modes)


def write_lines(watcher: TopWatcher, every_s: float) -> None:
    """Write a plain line every `every_s` seconds. The loss of the connection is reported once, on stderr."""
    due_s, last_state = 0.0, ""

    def write(metrics: TopMetrics, error: str | None) -> None:
        nonlocal due_s, last_state
        if error is not None:
            if last_state != "unreachable":
                typer.echo(f"{plain(error)}; retrying", err=True)
            last_state = "unreachable"
        elif metrics.snapshot is not None and monotonic() >= due_s:
            if last_state == "unreachable":
                typer.echo("the server is reachable again", err=True)
            last_state, due_s = "connected", monotonic() + every_s
            typer.echo(f"{strftime('%H:%M:%S')} {plain(plain_line(metrics))}")

    while True:
        watcher.show(write)
        watcher.wait(POLL_S)
