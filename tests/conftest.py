"""What holds for every test: which source it tests, what it needs, and that no property is judged by a clock."""

import gc
import logging
import os
import sys
import threading
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

import quire
from tests.support.machine import needs
from tests.support.machine.process_memory import give_back_memory

if "QUIRE_TESTED_FROM" in os.environ and not Path(quire.__file__).is_relative_to(os.environ["QUIRE_TESTED_FROM"]):
    # A mutation run must test the copy it was given, not the installed source.
    raise RuntimeError(f"the tests import {quire.__file__}, not the mutant in {os.environ['QUIRE_TESTED_FROM']}")

# As backends/load.py does for who has not imported torch yet; here test modules are first. Without it threads that wait
# for each other burn the processor that the other one needs, and on a busy machine a minute becomes ten.
os.environ.setdefault("GOMP_SPINCOUNT", "5000")

# A busy machine makes an example slow, or the drawing of one; neither is a mistake.
settings.register_profile("quire", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("quire")

TESTS = Path(__file__).parent
MARKERS = {
    "torch": {"torch", "transformers"},
    "sockets": {"aiohttp", "http.client", "http.server", "socket", "subprocess", "uvicorn", "zmq.asyncio"},
}
"""By what a file imports, itself or through others."""
SERVES_MODELS = ("e2e", "perf", "promises")
"""Directories whose tests load models in other processes."""
MEASURED = (
    *("unit/core", "unit/engine/test_engine_watch.py", "unit/fleet", "unit/worker"),
    *("property/test_ledger.py", "property/test_pictures.py"),
)
"""Whose tests must take every branch of what pyproject.toml says is measured. To watch the others as well would show
nothing more, and they would take twice as long."""


class _Unmet(pytest.Module):
    """A file that cannot be imported here: its tests are skipped, and the reason is told."""

    def collect(self) -> list[pytest.Item | pytest.Collector]:
        pytest.skip(f"not installed: {', '.join(needs.missing(self.path))}", allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    return _Unmet.from_parent(parent, path=module_path) if needs.missing(module_path) else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marks = {path: _marks(path) for path in {item.path for item in items}}
    for item in items:
        for name in marks[item.path]:
            item.add_marker(name)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """The marker of pytest-cov for this does nothing in the processes of xdist: two measurements lie over each other
    there, and the marker ends one of them."""
    if any(item.path.is_relative_to(TESTS / measured) for measured in MEASURED):
        return (yield)
    here, in_threads = sys.gettrace(), threading.gettrace()
    _trace(None, None)
    try:
        return (yield)
    finally:
        _trace(here, in_threads)


def _trace(here: Any, in_threads: Any) -> None:
    sys.settrace(here)
    threading.settrace(in_threads)


@pytest.fixture(autouse=True)
def _logging_as_it_was() -> Iterator[None]:
    """A command that ran here logs to its test's stderr, which is closed when that test has ended."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def pytest_collection_finish() -> None:
    # What was imported stays. Looking through it for what has gone would take half a second each time.
    gc.collect()
    gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    if nextitem is None or nextitem.path != item.path:
        give_back_memory()


def _marks(path: Path) -> list[str]:
    is_serving = path.relative_to(TESTS).parts[0] in SERVES_MODELS
    return [name for name, modules in MARKERS.items() if is_serving or needs.needs(path) & modules]
