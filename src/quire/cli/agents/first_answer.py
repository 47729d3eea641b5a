"""Progress of the agent's first prompt, in the terminal line above its first answer.

The line is written only while the terminal is in its normal mode: an agent that draws a picture of its own switches
that mode off, and gets no line into its picture.
"""

import json
import sys
import termios
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from time import monotonic
from typing import TYPE_CHECKING, Any, TextIO

from quire.cli.agents.prompt_speeds import duration_text
from quire.errors import QuireError
from quire.terminal import LOCAL_MODES

if TYPE_CHECKING:
    from quire.cli.watch.watch_source import WatchSource

ERASE_LINE = "\r\x1b[2K"
MIN_TOKENS = 512
"""A prompt with fewer tokens to compute is read at once."""
MIN_MEASURED_S = 2.0
END_S = 2.0
"""Longest wait for the thread; a server sends two snapshots per second."""


@dataclass(slots=True)
class FirstPrompt:
    """The longest prompt that the agent has sent so far, from the running requests of a server's snapshots."""

    clock: Callable[[], float] = monotonic
    _id: str = ""
    _num_tokens: int = 0
    _began: tuple[float, int] = (0.0, 0)
    """When the prompt was first seen, and the tokens that were computed then."""
    is_over: bool = False
    """Whether its answer has begun, or its request has ended."""

    def update(self, running: Iterable[Mapping[str, Any]]) -> str:
        """Return the line for these running requests; empty: there is nothing to show."""
        rows = {row["request_id"]: row for row in running}
        longest = max(rows.values(), key=lambda row: int(row["prompt_tokens"]), default=None)
        if longest is not None and longest["prompt_tokens"] > self._num_tokens:
            self._id, self._num_tokens = longest["request_id"], int(longest["prompt_tokens"])
            self._began = (self.clock(), int(longest["computed"]))
        row = rows.get(self._id)
        is_long = self._num_tokens - self._began[1] >= MIN_TOKENS
        self.is_over = is_long and (row is None or row["phase"] == "answer")
        if row is None or row["phase"] == "answer" or not is_long:
            return ""
        return self._line(int(row["computed"]))

    def _line(self, num_computed: int) -> str:
        began_s, num_before = self._began
        elapsed_s, num_done = self.clock() - began_s, num_computed - num_before
        line = f"prompt: {num_computed:,} of {self._num_tokens:,} tokens ({num_computed / self._num_tokens:.0%})"
        if elapsed_s < MIN_MEASURED_S or num_done <= 0:
            return line
        return f"{line}, about {duration_text((self._num_tokens - num_computed) * elapsed_s / num_done)} left"


@contextmanager
def first_prompt_progress(source: "WatchSource", model: str, terminal: TextIO = sys.stderr) -> Iterator[None]:
    """Show the progress of the first long prompt while this context is open, on a terminal; otherwise do nothing."""
    if not terminal.isatty():
        yield
        return
    is_closed = threading.Event()
    thread = threading.Thread(target=show_progress_line, args=(source, model, terminal, is_closed), daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_closed.set()
        thread.join(END_S)


def show_progress_line(source: "WatchSource", model: str, terminal: TextIO, is_closed: threading.Event) -> None:
    """Redraw the line with each snapshot, until the answer begins or `is_closed` is set; then erase it."""
    prompt, shown = FirstPrompt(), ""
    with suppress(QuireError, OSError, ValueError, KeyError):
        for snapshot in source.snapshots(model):
            if is_closed.is_set():
                break
            line = prompt.update(json.loads(snapshot)["running"])
            if line != shown and is_in_normal_mode(terminal):
                terminal.write(ERASE_LINE + line)
                terminal.flush()
                shown = line
            if prompt.is_over:
                break
    if shown and is_in_normal_mode(terminal):
        terminal.write(ERASE_LINE)
        terminal.flush()


def is_in_normal_mode(terminal: TextIO) -> bool:
    """Whether the terminal edits lines and echoes characters itself, so that no program draws on it."""
    with suppress(OSError, ValueError, termios.error):
        modes = termios.tcgetattr(terminal.fileno())[LOCAL_MODES]
        return bool(modes & termios.ICANON and modes & termios.ECHO)
    return False
