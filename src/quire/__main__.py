"""The `quire` command, also run as `python -m quire`.

SIGTERM works from the very start. The kernel drops signals for which PID 1 of a container has no handler, and importing
the command line takes most of a second. Therefore a handler is installed before those imports; a server later replaces
it with a handler that shuts down cleanly.
"""

import os
import signal


def _end_at_once(number: int, _frame: object) -> None:
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    os._exit(128 + number)  # PID 1 of a container survives the default action


def main() -> None:
    """Install the SIGTERM handler, then run the command line."""
    if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _end_at_once)
    from quire.cli import main as run  # noqa: PLC0415 - slow, so the handler comes first

    run()


if __name__ == "__main__":
    main()
