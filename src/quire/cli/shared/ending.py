"""Orderly termination on SIGTERM and SIGHUP, so that closing the terminal leaves no files or processes."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager

EXIT_SIGNALS = (signal.SIGTERM, signal.SIGHUP)


@contextmanager
def exit_on_signals() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP into SystemExit, so that open contexts are closed."""

    def exit_process(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    old_handlers = {number: signal.signal(number, exit_process) for number in EXIT_SIGNALS}
    try:
        yield
    finally:
        for number, handler in old_handlers.items():
            signal.signal(number, handler)
