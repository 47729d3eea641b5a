"""Members in processes of their own for the proofs of the fleet: oracles, or a real model as a person starts it."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.support.machine.spawned import MEMBER_AT, in_checkout, spawn, stop

Command = Callable[[str], Sequence[str]]
"""Of an address, what is to be run."""


def oracle_command(step_s: float, keys: Path | None = None) -> Command:
    """A member without a model."""
    told = [str(step_s), *([] if keys is None else [str(keys)])]
    return lambda address: [sys.executable, "-m", "tests.support.fleet.oracle_member", address, *told]


def model_command(model: Path, keys: Path, *flags: str) -> Command:
    """`quire fleet member`."""
    member = [sys.executable, "-m", "quire", "fleet", "member", str(model), "--fleet-keys", str(keys), *flags]
    return lambda address: [*member, "--listen", address]


class MemberLife:
    """A member that may be ended and begun again at the same address."""

    def __init__(self, command: Command, log: Path) -> None:
        self.command = command
        self.log = log
        self.address = "tcp://127.0.0.1:*"
        self.begin_again()

    def begin_again(self) -> None:
        """A first life, or another one."""
        one = spawn(self.command(self.address), self.log, in_checkout())
        self.process, self.address = one.process, one.wait_for(MEMBER_AT)

    def end(self, number: int) -> int:
        """By a signal; its exit code."""
        self.process.send_signal(number)
        return self.ended()

    def ended(self) -> int:
        """Wait for its end."""
        return self.process.wait()


@contextmanager
def member_lives(command: Command, count: int) -> Iterator[list[MemberLife]]:
    """So many, begun one after the other, and killed at the end."""
    lives = list[MemberLife]()
    with TemporaryDirectory(prefix="quire-members-") as folder:
        try:
            for number in range(count):
                lives.append(MemberLife(command, Path(folder, str(number))))
            yield lives
        finally:
            for life in lives:
                stop(life.process, 0)
