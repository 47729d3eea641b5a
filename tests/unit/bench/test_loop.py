"""The loop a measurement runs on."""

import asyncio
import sys

import pytest

from quire.bench.event_loop import finished, loop_factory


def test_work_is_run_to_its_end() -> None:
    async def work() -> str:
        await asyncio.sleep(0)
        return "done"

    assert finished(work()) == "done"


def test_without_uvloop_the_standard_loop_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvloop", None)
    assert loop_factory() is asyncio.new_event_loop
