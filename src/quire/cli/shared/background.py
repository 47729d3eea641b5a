"""Work that waits for a network or a disk, in a thread that nobody waits for.

A download hangs in a socket where no signal reaches it, and the library that makes it keeps threads that Python would
wait for at the end. So whoever is told to end leaves all of them behind. Nothing half done is ever taken for whole:
downloads and conversions get their names when they are complete, and what was begun is resumed or thrown away.
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
"""How long work that can be stopped may take to clean up."""

_is_over = threading.Event()


class _StoppedError(BaseException):
    """Nobody needs the result any more. Not an Exception: no one on the way up may take it for a failure."""


def in_background(work: "Callable[[Progress], T]", progress: "Progress") -> "Future[T]":
    """Start it. The work is handed a progress, where it can be stopped; the result can be waited for on any thread."""
    future: Future[T] = Future()

    def tell(label: str, done_bytes: int, total_bytes: int) -> None:
        if _is_over.is_set():
            raise _StoppedError
        progress(label, done_bytes, total_bytes)

    def run() -> None:
        future.set_running_or_notify_cancel()
        try:
            future.set_result(work(tell))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name=NAME, daemon=True).start()
    return future


def leave_background(code: int) -> None:
    """The process ends: with everything that is still at work in the background, if anything is."""
    working = [thread for thread in threading.enumerate() if thread.name == NAME]
    if not working:
        return
    _is_over.set()
    for thread in working:
        thread.join(EXIT_GRACE_S)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)
