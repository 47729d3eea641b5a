"""Work that gives way: loading a model must not make the answers of another one crawl.

A thread may lower its own priority and nobody without rights can raise it again. So the work is done in a thread that
ends with it: threads it starts meanwhile are as patient as it is, and whoever waits for it keeps its priority. Where
the system gives each session its share whatever priorities say, the session is made patient for as long as it takes.
"""

import contextlib
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
NICENESS = 10
"""Of a core that somebody else wants too, about a tenth is left for this."""
SESSION = Path("/proc/self/autogroup")


def giving_way(work: Callable[[], T]) -> T:
    """What the work comes to, or what it raises."""
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
