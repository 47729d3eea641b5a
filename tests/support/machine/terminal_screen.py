"""A terminal without a window: a program runs in a pty, and what a person would see of it is kept, line by line.

Knows what our programs write (text, line ends, the cursor up, down, left, right, erasing lines and what is below,
colours) and raises on anything else, so that nothing is drawn wrongly in silence. A line that the terminal broke
because it was too long is one line again.
"""

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from tests.support.machine.patience import PATIENCE_S

SEQUENCE = re.compile(r"\x1b\[(\??)([0-9;]*)([A-Za-z])")
PART_OF_SEQUENCE = re.compile(r"\x1b(\[\??[0-9;]*)?$")
READ_BYTES = 65536
OWN_TERMINAL = (
    "import fcntl, os, signal, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
    "signal.signal(signal.SIGINT, signal.SIG_DFL); os.execvp(sys.argv[1], sys.argv[1:])"
)
"""Run first by a new session's leader: its standard input becomes the terminal whose Ctrl-C reaches it. A shell that
started the tests in the background had Ctrl-C ignored, which would be inherited."""


@dataclass
class Screen:
    """What stands in a terminal of some width: all lines since the program began, none is lost above."""

    width: int
    rows: list[list[str]] = field(default_factory=lambda: [[]])
    goes_on: list[bool] = field(default_factory=lambda: [False])
    """Whether a row is the rest of the one above it."""
    row: int = 0
    column: int = 0
    _rest: str = ""

    def feed(self, text: str) -> None:
        """What a program has written."""
        text = self._rest + text
        unfinished = PART_OF_SEQUENCE.search(text)
        self._rest = "" if unfinished is None else text[unfinished.start() :]
        text = text[: len(text) - len(self._rest)]
        at = 0
        while at < len(text):
            if text[at] == "\x1b":
                found = SEQUENCE.match(text, at)
                if found is None:
                    raise ValueError(f"a sequence that this terminal does not know: {text[at : at + 20]!r}")
                self._obey(found[1], found[2], found[3])
                at = found.end()
            else:
                self._write(text[at])
                at += 1

    def lines(self) -> list[str]:
        """From the top; what was broken for its length is whole again."""
        whole: list[str] = []
        for row, goes_on in zip(self.rows, self.goes_on, strict=True):
            if goes_on and whole:
                whole[-1] += "".join(row)
            else:
                whole.append("".join(row))
        return [line.rstrip() for line in whole]

    def _write(self, character: str) -> None:
        match character:
            case "\r":
                self.column = 0
            case "\n":
                self._down()
            case "\b":
                self.column = max(0, self.column - 1)
            case "\x03" | "\x07":
                pass  # a bell, and a Ctrl-C that the terminal does not spell
            case _:
                if self.column == self.width:
                    self._down()
                    self.column, self.goes_on[self.row] = 0, True
                cells = self.rows[self.row]
                cells.extend(" " * (self.column + 1 - len(cells)))
                cells[self.column] = character
                self.column += 1

    def _down(self) -> None:
        self.row += 1
        if self.row == len(self.rows):
            self.rows.append([])
            self.goes_on.append(False)

    def _obey(self, private: str, numbers: str, letter: str) -> None:
        count = int(numbers.split(";", maxsplit=1)[0] or 0)
        match letter:
            case "A":
                self.row = max(0, self.row - max(1, count))
            case "B":
                self.row = min(len(self.rows) - 1, self.row + max(1, count))
            case "C":
                self.column = min(self.width - 1, self.column + max(1, count))
            case "D":
                self.column = max(0, min(self.column, self.width - 1) - max(1, count))
            case "G":
                self.column = max(0, count - 1)
            case "K":
                self._erase_line(count)
            case "J" if count == 0:
                self._erase_line(0)
                del self.rows[self.row + 1 :], self.goes_on[self.row + 1 :]
            case "m" | "h" | "l" if letter == "m" or private:
                pass  # colours, whether the cursor is seen, how pastes are marked
            case _:
                raise ValueError(f"a sequence that this terminal does not know: {private}{numbers}{letter}")

    def _erase_line(self, what: int) -> None:
        cells = self.rows[self.row]
        if what == 0:
            del cells[self.column :]
        else:
            cells[:] = [] if what == 2 else [" "] * min(self.column + 1, len(cells)) + cells[self.column + 1 :]
        if not cells:
            self.goes_on[self.row] = False


@dataclass
class Terminal:
    """A program that runs in one."""

    process: "subprocess.Popen[bytes]"
    screen: Screen
    descriptor: int
    num_bytes: int = 0
    """That it has written."""
    _undecoded: bytes = b""

    def read(self, seconds: float) -> bool:
        """What comes within this time; false once nothing will come any more."""
        if not select.select([self.descriptor], [], [], seconds)[0]:
            return True
        try:
            data = os.read(self.descriptor, READ_BYTES)
        except OSError:  # the other side is closed
            return False
        self.num_bytes += len(data)
        text = (self._undecoded + data).decode("utf-8", "surrogateescape")
        cut = next((n for n in (1, 2, 3) if len(text) >= n and "\udc80" <= text[-n] <= "\udcff"), 0)
        self._undecoded = text[len(text) - cut :].encode("utf-8", "surrogateescape") if cut else b""
        self.screen.feed(text[: len(text) - cut] if cut else text)
        return bool(data)

    def until(self, is_so: "Callable[[Terminal], bool]", seconds: float = PATIENCE_S) -> None:
        """Read until this is so. Raises TimeoutError; a program that ended before has what it has."""
        deadline_s = time.monotonic() + seconds
        while not is_so(self):
            if not self.read(0.1) and not is_so(self):
                return
            if time.monotonic() > deadline_s:
                raise TimeoutError("\n".join(self.screen.lines()))

    def shows(self, words: str) -> bool:
        """Whether it can be read now."""
        return any(words in line for line in self.screen.lines())

    def type(self, text: str) -> None:
        """As a person at the keyboard: control characters become signals."""
        os.write(self.descriptor, text.encode())

    def end(self) -> int:
        """Everything until the program has ended; its exit code."""
        deadline_s = time.monotonic() + PATIENCE_S
        while self.read(0.1) and time.monotonic() < deadline_s:
            if self.process.poll() is not None:
                while select.select([self.descriptor], [], [], 0)[0] and self.read(0):
                    pass
                break
        return self.process.wait(PATIENCE_S)


@contextmanager
def terminal(words: Sequence[str], environment: Mapping[str, str], width: int = 80) -> Iterator[Terminal]:
    """A program in a terminal of its own, which is its controlling one: Ctrl-C reaches it. It is ended at the end."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, width, 0, 0))
    around = {**environment, "TERM": "xterm-256color"}
    for name in ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR"):
        around.pop(name, None)
    process = subprocess.Popen(
        [sys.executable, "-c", OWN_TERMINAL, *words],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=around,
        start_new_session=True,
    )
    os.close(theirs)
    running = Terminal(process, Screen(width), ours)
    try:
        yield running
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(PATIENCE_S)
        os.close(ours)


BEGINNINGS = re.compile(
    r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d|listening on http|try: curl |chat in a browser|type a message; "
    r"|error: |hint: |(reading|fetching|converting) \S+ +[━╸╺]|loading weights|\^C"
)
"""How lines begin that our commands write, and what a terminal shows of Ctrl-C."""
BAR = re.compile(r"[━╸╺]")
WHOLE_BAR = re.compile(r"[^━╸╺]+[━╸╺]+ +\d+% (\d:\d\d:\d\d|-:--:--)")


def is_glued(line: str) -> bool:
    """Whether two things stand in it: something began behind something else, or text is behind or before a bar."""
    if BAR.search(line):
        return WHOLE_BAR.fullmatch(line.strip()) is None
    first = BEGINNINGS.match(line)
    at = 0 if first is None else first.end()
    return BEGINNINGS.search(line, max(at, 1)) is not None or (first is not None and first[0] == "^C" != line)
