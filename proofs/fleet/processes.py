"""Member processes for the proofs of the fleet: oracles, which compute nothing, or `quire fleet member`."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.support.machine.spawned import MEMBER_AT, in_checkout, spawn, stop

Command = Callable[[str], Sequence[str]]
"""Returns the command of a member that listens at this address."""


def oracle_command(step_s: float, keys: Path | None = None) -> Command:
    """Return the command of an oracle."""
    arguments = [str(step_s), *([] if keys is None else [str(keys)])]
    return lambda address: [sys.executable, "-m", "tests.support.fleet.oracle_member", address, *arguments]


def model_command(model: Path, keys: Path, *flags: str) -> Command:
    """Return the command of `quire fleet member`."""
    member = [sys.executable, "-m", "quire", "fleet", "member", str(model), "--fleet-keys", str(keys), *flags]
    return lambda address: [*member, "--listen", address]


class MemberProcess:
    """A member process that can be stopped and restarted at the same address."""

    def __init__(self, command: Command, log: Path) -> None:
        self.command = command
        self.log = log
        self.address = "tcp://127.0.0.1:*"
        self.start()

    def start(self) -> None:
        """Start the process, and wait until it listens."""
        one = spawn(self.command(self.address), self.log, in_checkout())
        self.process, self.address = one.process, one.wait_for(MEMBER_AT)

    def end(self, signal_number: int) -> int:
        """Send a signal, wait, and return the exit code."""
        self.process.send_signal(signal_number)
        return self.ended()

    def ended(self) -> int:
        """Wait for the process to end, and return its exit code."""
        return self.process.wait()


@contextmanager
def member_processes(command: Command, count: int) -> Iterator[list[MemberProcess]]:
    """Start so many members one after the other, and kill them at the end."""
    members = list[MemberProcess]()
    with TemporaryDirectory(prefix="quire-members-") as folder:
        try:
            for number in range(count):
                members.append(MemberProcess(command, Path(folder, str(number))))
            yield members
        finally:
            for member in members:
                stop(member.process, 0)
