"""Members in processes of their own for the proofs of the fleet: oracles, or a real model as a person starts it."""

import os
import re
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Thread

ROOT = Path(__file__).parents[2]
MEMBER_AT = r"member at ([^,;]+)"
LISTENING_ON = r"listening on ([^,;\s]+)"
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


def environment() -> dict[str, str]:
    """With this checkout before all others."""
    path = os.pathsep.join(filter(None, (str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path}


def spawned(command: Sequence[str], pattern: str) -> tuple["subprocess.Popen[str]", str]:
    """A process, and what it said of itself."""
    process = subprocess.Popen(command, stderr=subprocess.PIPE, env=environment(), text=True)
    if process.stderr is None:
        raise RuntimeError("a process without a voice")
    said = list[str]()
    for line in process.stderr:
        said.append(line)
        if found := re.match(pattern, line):
            # A process whose voice nobody hears stands still once the pipe is full.
            Thread(target=deque, args=(process.stderr, 0), daemon=True).start()
            return process, found[1]
    raise RuntimeError(f"{command} ended before it was ready: {''.join(said)[-2000:]}")


@dataclass
class MemberLife:
    """A member that may be ended and begun again at the same address."""

    command: Command
    process: "subprocess.Popen[str]"
    address: str

    @classmethod
    def begun(cls, command: Command) -> "MemberLife":
        process, address = spawned(command("tcp://127.0.0.1:*"), MEMBER_AT)
        return cls(command, process, address)

    def end(self, number: int) -> int:
        """By a signal; its exit code."""
        self.process.send_signal(number)
        return self.ended()

    def ended(self) -> int:
        """Wait for its end."""
        return self.process.wait()

    def begin_again(self) -> None:
        """Another life of it."""
        self.process, _ = spawned(self.command(self.address), MEMBER_AT)


@contextmanager
def member_lives(command: Command, count: int) -> Iterator[list[MemberLife]]:
    """So many, begun one after the other, and killed at the end."""
    lives = list[MemberLife]()
    try:
        for _ in range(count):
            lives.append(MemberLife.begun(command))
        yield lives
    finally:
        for life in lives:
            life.process.kill()
            life.process.wait()
