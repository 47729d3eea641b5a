"""Work that gives way to others, and leaves no trace of that behind."""

import os
import threading
from pathlib import Path

import pytest

from quire.engine.grammar_thread import NICENESS
from quire.worker.child import process
from quire.worker.child.process import run_at_low_priority


def niceness(thread_id: int) -> int:
    return os.getpriority(os.PRIO_PROCESS, thread_id)


def test_the_work_and_what_it_starts_is_patient_and_who_waits_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = tmp_path / "autogroup"
    monkeypatch.setattr(process, "AUTOGROUP_FILE", session)
    found: list[int] = []
    before = niceness(threading.get_native_id())

    def look() -> None:
        found.append(niceness(threading.get_native_id()))

    def work() -> str:
        look()
        started = threading.Thread(target=look)
        started.start()
        started.join()
        assert session.read_text() == str(NICENESS)
        return "done"

    assert run_at_low_priority(work) == "done"
    assert found == [NICENESS, NICENESS]
    assert niceness(threading.get_native_id()) == before
    assert session.read_text() == "0"


def test_what_the_work_raises_is_raised_and_a_system_without_priorities_is_no_obstacle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "AUTOGROUP_FILE", tmp_path / "none" / "autogroup")

    def refused(*_given: int) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "setpriority", refused)

    def work() -> None:
        raise KeyError("x")

    with pytest.raises(KeyError):
        run_at_low_priority(work)
    assert run_at_low_priority(lambda: 3) == 3
