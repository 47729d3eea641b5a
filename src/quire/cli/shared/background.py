"""Work on a network or a disk, in a thread that does not delay the exit.

A download blocks in a socket where no signal reaches it, and the download library keeps threads that Python joins at
exit. So the process exits without joining them. Incomplete files are never used: downloads and conversions get their
names when they are complete, and partial ones are resumed or discarded.
"""

import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from quire.checkpoints import Progress

T = TypeVar("T")
NAME = "quire-background"
EXIT_GRACE_S = 0.5
"""Time for stoppable work to clean up."""

_is_over = threading.Event()


class _StoppedError(BaseException):
    """The result is no longer needed. Not an Exception, so that no handler treats it as a failure."""


def in_background(work: "Callable[[Progress], T]", progress: "Progress") -> "Future[T]":
    """Start the work. It can be stopped whenever it reports progress; any thread can wait for the result."""
    future: Future[T] = Future()

    def report(label: str, done_bytes: int, total_bytes: int) -> None:
        if _is_over.is_set():
            raise _StoppedError
        progress(label, done_bytes, total_bytes)

    def run() -> None:
        future.set_running_or_notify_cancel()
        try:
            future.set_result(work(report))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name=NAME, daemon=True).start()
    return future


def leave_background(code: int) -> None:
    """Exit the process at once if background work is still running; otherwise return."""
    working = [thread for thread in threading.enumerate() if thread.name == NAME]
    if not working:
        return
    _is_over.set()
    for thread in working:
        thread.join(EXIT_GRACE_S)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)
