"""Orderly termination on SIGTERM and SIGHUP, so that closing the terminal leaves no files or processes."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager

ENDINGS = (signal.SIGTERM, signal.SIGHUP)


@contextmanager
def ending() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP into SystemExit, so that open contexts are closed."""

    def end(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, end) for number in ENDINGS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
