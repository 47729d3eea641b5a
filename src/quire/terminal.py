"""Temporarily disable a local mode of a terminal, such as the echo of typed characters."""

import os
import termios
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TextIO

LOCAL_MODES = 3
"""Index of the local modes (lflag) in the list that `termios.tcgetattr` returns."""


@contextmanager
def without_mode(stream: TextIO, mode: int) -> Iterator[None]:
    """Disable a local mode such as `termios.ECHO` of this stream's terminal; restore it on exit if it was on."""
    was_on = _switch(stream, mode, is_on=False)
    try:
        yield
    finally:
        if was_on:
            _switch(stream, mode, is_on=True)


def _switch(stream: TextIO, mode: int, *, is_on: bool) -> bool:
    """Return whether the mode was on. A background job changes nothing, because the kernel would stop it (SIGTTOU)."""
    with suppress(OSError, ValueError, AttributeError, termios.error):  # the stream is not a terminal
        terminal = stream.fileno()
        if os.tcgetpgrp(terminal) == os.getpgrp():
            modes = termios.tcgetattr(terminal)
            was_on = bool(modes[LOCAL_MODES] & mode)
            modes[LOCAL_MODES] = modes[LOCAL_MODES] | mode if is_on else modes[LOCAL_MODES] & ~mode
            termios.tcsetattr(terminal, termios.TCSANOW, modes)
            return was_on
    return False
