"""Network and disk work in a thread that does not delay the exit of the process.

A signal does not interrupt a download that blocks in a socket, and Python joins the download library's threads at exit.
So the process exits without joining it. Incomplete files are never used: downloads and conversions get their final
names when complete; partial files are resumed or discarded.
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
THREAD_NAME = "quire-background"
EXIT_GRACE_S = 0.5
"""Time for background work to clean up before the process exits."""

_is_exiting = threading.Event()


class _StoppedError(BaseException):
    """Raised in background work when the process exits. Not an Exception, so that handlers do not catch it."""


def in_background(work: "Callable[[Progress], T]", progress: "Progress") -> "Future[T]":
    """Start the work in a thread. It can be stopped when it reports progress; any thread can wait for the result."""
    future: Future[T] = Future()

    def report(label: str, done_bytes: int, total_bytes: int) -> None:
        if _is_exiting.is_set():
            raise _StoppedError
        progress(label, done_bytes, total_bytes)

    def run() -> None:
        future.set_running_or_notify_cancel()
        try:
            future.set_result(work(report))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name=THREAD_NAME, daemon=True).start()
    return future


def with_progress(work: "Callable[[Progress], T]") -> T:
    """Run work in the background, show its progress, and return its result."""
    from quire.checkpoints.progress import show_progress

    with show_progress() as progress:
        return in_background(work, progress).result()


def leave_background(code: int) -> None:
    """Exit the process at once if background work is still running; otherwise return."""
    threads = [thread for thread in threading.enumerate() if thread.name == THREAD_NAME]
    if not threads:
        return
    _is_exiting.set()
    for thread in threads:
        thread.join(EXIT_GRACE_S)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)
