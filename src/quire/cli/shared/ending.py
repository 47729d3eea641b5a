"""How a command ends: orderly on SIGTERM and SIGHUP, so that closing the terminal leaves nothing behind, and on Ctrl-C
without a ^C of the terminal in the middle of a line.
"""

import os
import signal
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager, suppress

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


@contextmanager
def without_echoed_controls() -> Iterator[None]:
    """A terminal draws ^C the moment it is typed, in the middle of whatever line is written. Here it does not."""
    was_on = _set_echoed_controls(on=False)
    try:
        yield
    finally:
        if was_on:
            _set_echoed_controls(on=True)


def _set_echoed_controls(*, on: bool) -> bool:
    """Returns whether they were on. A job in the background leaves the terminal alone: it would be stopped."""
    with suppress(OSError, ValueError, termios.error):
        terminal = sys.stderr.fileno()
        if os.tcgetpgrp(terminal) == os.getpgrp():
            modes = termios.tcgetattr(terminal)
            was_on = bool(modes[3] & termios.ECHOCTL)
            modes[3] = modes[3] | termios.ECHOCTL if on else modes[3] & ~termios.ECHOCTL
            termios.tcsetattr(terminal, termios.TCSANOW, modes)
            return was_on
    return False
