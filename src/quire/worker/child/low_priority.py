"""Low-priority work: loading a model must not slow down the responses of another one.

A thread may lower its own priority and cannot raise it again without rights. So the work is done in a thread that
ends with it: threads it starts meanwhile inherit its priority, and the caller keeps its own. Where the system
gives each session its share whatever the priorities, the session's is lowered for as long as it takes.
"""

import contextlib
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
NICENESS = 10
"""On a core that another process uses too, about a tenth is left for this."""
SESSION = Path("/proc/self/autogroup")


def at_low_priority(work: Callable[[], T]) -> T:
    """The result of the work, or its exception."""
    results: list[T] = []
    failures: list[BaseException] = []

    def run() -> None:
        with contextlib.suppress(OSError, AttributeError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        try:
            results.append(work())
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run, name="quire-load")
    _make_session(NICENESS)
    try:
        thread.start()
        thread.join()
    finally:
        _make_session(0)
    if failures:
        raise failures[0]
    return results[0]


def _make_session(niceness: int) -> None:
    with contextlib.suppress(OSError):
        SESSION.write_text(str(niceness))
