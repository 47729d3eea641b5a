"""Stolen time: how long the host of this virtual machine ran other machines on each of its processors.

`/proc/stat` counts stolen time too, but late and in hundredths of a second. So a *bystander*, a process on each
processor, with real-time priority where this is permitted, reads the clock every PERIOD_S and records how late it was.
Time that a measured thread loses meanwhile on that processor is not its own fault.

    python -m proofs.framework.stolen_time PROCESSOR FILE     run one bystander until it is killed
"""

import mmap
import os
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.record import ROOT

PERIOD_S = 0.002
RECORD = struct.Struct("dd")
"""When a bystander last read the clock, and the sum of its delays, in seconds."""


@dataclass(frozen=True, slots=True)
class Bystander:
    """The process of one bystander, and the record it shares with us."""

    process: "subprocess.Popen[bytes]"
    record: mmap.mmap

    def lost_s(self) -> float:
        """The time that its processor has lost so far, including a loss that still goes on."""
        while True:
            last_s, late_s = RECORD.unpack_from(self.record)
            if (last_s, late_s) == RECORD.unpack_from(self.record):
                return float(late_s + max(0.0, time.monotonic() - last_s - PERIOD_S))

    @property
    def has_begun(self) -> bool:
        """Whether it has read the clock once."""
        return bool(RECORD.unpack_from(self.record)[0])


class StolenTime:
    """The losses of all processors, read from their bystanders."""

    def __init__(self, bystanders: Sequence[Bystander]) -> None:
        self.bystanders = bystanders

    def now(self) -> tuple[float, ...]:
        """The seconds that each processor has lost so far."""
        return tuple(bystander.lost_s() for bystander in self.bystanders)

    def since(self, before: tuple[float, ...]) -> float:
        """The most that any processor has lost since `now()` returned `before`."""
        return max(now_s - before_s for now_s, before_s in zip(self.now(), before, strict=True))


@contextmanager
def watch_stolen_time() -> Iterator[StolenTime]:
    """Run a bystander on each processor for as long as the block runs."""
    with TemporaryDirectory(prefix="quire-stolen-") as folder:
        bystanders = [_start(processor, Path(folder)) for processor in sorted(os.sched_getaffinity(0))]
        try:
            for bystander in bystanders:
                _wait_until_begun(bystander)
            yield StolenTime(bystanders)
        finally:
            for bystander in bystanders:
                bystander.process.kill()
                bystander.process.wait()
                bystander.record.close()


def _start(processor: int, folder: Path) -> Bystander:
    path = folder / str(processor)
    path.write_bytes(bytes(RECORD.size))
    process = subprocess.Popen(
        [sys.executable, "-m", "proofs.framework.stolen_time", str(processor), str(path)], cwd=ROOT
    )
    return Bystander(process, _map_file(path))


def _wait_until_begun(bystander: Bystander) -> None:
    while not bystander.has_begun:
        if bystander.process.poll() is not None:
            raise RuntimeError(f"a bystander ended with code {bystander.process.returncode} before it began")
        time.sleep(0.01)


def _map_file(path: Path) -> mmap.mmap:
    with path.open("r+b") as file:
        return mmap.mmap(file.fileno(), RECORD.size)


def run_bystander(processor: int, path: Path) -> None:
    """Read the clock on this processor until the process is killed."""
    os.sched_setaffinity(0, {processor})
    with suppress(PermissionError):  # then other programs on this processor delay it, too
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    record, late_s, last_s = _map_file(path), 0.0, time.monotonic()
    while True:
        time.sleep(PERIOD_S)
        now_s = time.monotonic()
        late_s += max(0.0, now_s - last_s - PERIOD_S)
        last_s = now_s
        RECORD.pack_into(record, 0, last_s, late_s)


if __name__ == "__main__":
    run_bystander(int(sys.argv[1]), Path(sys.argv[2]))
