"""The `quire` command, also as `python -m quire`.

SIGTERM is answered from the first moment on. As the first process of a container we would not even be told of it: the
kernel drops what such a process has no handler for, and reading the code of the command line takes most of a second. So
the handler comes before those imports; a server puts its own in its place when it has something to close.
"""

import os
import signal


def _end_at_once(number: int, _frame: object) -> None:
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    os._exit(128 + number)  # the first process of a container is still there


def main() -> None:
    """Answer SIGTERM, then do what was asked."""
    if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _end_at_once)
    from quire.cli import main as run  # noqa: PLC0415 - after the handler

    run()


if __name__ == "__main__":
    main()
