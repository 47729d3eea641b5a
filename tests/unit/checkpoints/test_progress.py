"""Whoever waits is told, and no log is flooded."""

import io
import sys

import pytest

from quire.checkpoints import progress


def test_lines_come_at_most_every_two_seconds_and_at_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    clock = iter([0.0, 0.1, 1.9, 2.1, 2.2, 3.0])
    tell = progress.LinesOnStderr(lambda: next(clock))
    for done in (1, 2, 3, 4, 10):
        tell("converting x", done * 1_000_000, 10_000_000)
    assert capsys.readouterr().err.splitlines() == ["converting x: 3 of 10 MB", "converting x: 10 of 10 MB"]


def test_a_terminal_gets_a_bar_and_a_log_gets_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    with progress.show_progress() as tell:
        assert isinstance(tell, progress.LinesOnStderr)
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stderr", terminal)
    with progress.show_progress() as tell:
        tell("converting x", 1, 2)
        tell("converting x", 2, 2)
    assert "converting x" in terminal.getvalue()
    progress.quiet("x", 1, 2)
