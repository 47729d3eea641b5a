"""A bar ends when what it shows ends, and no line of a terminal has two things in it."""

import logging
import os
import pty
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from quire.checkpoints.progress import show_progress
from quire.observe import access_log
from tests.support.machine.patience import PATIENCE_S
from tests.support.machine.terminal_screen import BAR, Screen, Terminal, is_glued, terminal
from tests.support.models.tiny_models import Tiny, write_gguf

Lines = Callable[[], list[str]]
"""What stands on the terminal now, but for empty lines."""


@contextmanager
def on_terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Lines]:
    """A terminal as this process's stderr, into which it logs; everything is as it was afterwards."""
    ours, theirs = pty.openpty()
    os.set_blocking(ours, False)
    screen, root = Screen(80), logging.getLogger()
    handlers, level = root.handlers[:], root.level

    def now() -> list[str]:
        sys.stderr.flush()
        while data := _there(ours):
            screen.feed(data.decode())
        return [line for line in screen.lines() if line]

    with os.fdopen(theirs, "w") as stderr, monkeypatch.context() as changed:
        changed.setattr(sys, "stderr", stderr)
        changed.setenv("TERM", "xterm-256color")
        access_log.configure_logging("plain")
        yield now
    root.handlers[:] = handlers
    root.setLevel(level)
    os.close(ours)


def _there(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 65536)
    except BlockingIOError:
        return b""


def test_a_log_line_is_written_above_the_bar_and_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    with on_terminal(monkeypatch) as lines, show_progress() as progress:
        progress("loading weights", 1, 4)
        assert [line.split()[:2] for line in lines()] == [["loading", "weights"]]
        logging.getLogger("quire.test").info("worker 1 is %s", "ready " * 20)
        sys.stderr.write("memory\n")
        progress("loading weights", 2, 4)
        log, memory, bar = lines()
        assert not is_glued(log)
        assert log.endswith("ready ready"), "it was cut to the terminal's width"
        assert memory == "memory"
        assert bar.startswith("loading weights")


def test_a_bar_goes_with_the_last_byte_and_nothing_draws_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with on_terminal(monkeypatch) as lines:
        before = threading.active_count()
        with show_progress() as progress:
            progress("loading weights", 1, 4)
            progress("loading weights", 4, 4)
            assert (lines(), threading.active_count()) == ([], before)
            progress("loading weights", 1, 4)  # a worker is loaded once more
            assert len(lines()) == 1
            assert threading.active_count() == before, "who draws by a clock writes to an idle terminal"


def test_a_bar_of_work_that_was_broken_off_goes_with_its_block_and_others_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    with on_terminal(monkeypatch) as lines:
        with show_progress() as other:
            other("fetching b", 1, 4)
            with show_progress() as progress:
                progress("loading weights", 1, 4)
                assert len(lines()) == 2
            assert [line.split()[:2] for line in lines()] == [["fetching", "b"]]
        assert lines() == []


def test_a_server_in_a_terminal_leaves_whole_lines_and_no_bar(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "tiny.gguf", Tiny(hidden=128, intermediate=128))
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    words = [sys.executable, "-m", "quire", "serve", str(file), "--port", "0", "--memory", "1GiB"]

    def is_there(seen: Terminal) -> bool:
        return seen.shows("chat in a browser") or seen.process.poll() is not None

    with terminal(words, environment) as seen:
        seen.until(is_there, PATIENCE_S)
        shown = seen.screen.lines()
        seen.type("\x03")
        assert seen.end() == 0
    assert not [line for line in shown if BAR.search(line)], shown
    assert not [line for line in seen.screen.lines() if is_glued(line)], seen.screen.lines()
    assert [line for line in shown if line.startswith("listening on http://127.0.0.1:")], shown
