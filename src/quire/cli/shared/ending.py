"""How a command that holds something is told to end: closing the terminal leaves nothing of it behind."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager

ENDINGS = (signal.SIGTERM, signal.SIGHUP)


@contextmanager
def ending() -> Iterator[None]:
    """Whoever closes the terminal or ends the process lets what is open be closed first."""

    def end(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, end) for number in ENDINGS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
