"""How commands end: a Ctrl-C leaves no ^C in the middle of a line, and the terminal is as it was."""

import os
import sys
import termios

from tests.support.machine.terminal_screen import terminal

PROGRAM = """
import sys, termios, time
from quire.terminal import without_mode
with without_mode(sys.stderr, termios.ECHOCTL):
    try:
        print("half a ", end="", file=sys.stderr, flush=True)
        time.sleep(600)
    except KeyboardInterrupt:
        print("line", file=sys.stderr)
"""


def test_a_typed_ctrl_c_leaves_the_line_whole_and_the_terminal_as_it_was() -> None:
    with terminal([sys.executable, "-c", PROGRAM], os.environ) as seen:
        seen.until(lambda one: one.shows("half a"))
        assert not termios.tcgetattr(seen.descriptor)[3] & termios.ECHOCTL
        seen.type("\x03")
        seen.until(lambda one: one.shows("line"))
        assert seen.screen.lines()[0] == "half a line"
        seen.until(lambda one: bool(termios.tcgetattr(one.descriptor)[3] & termios.ECHOCTL))
        assert seen.end() == 0
