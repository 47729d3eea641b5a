"""How long this machine's processors were away: their host ran another machine, and nobody in here was told in time.

`/proc/stat` counts stolen time too, but late and in hundredths of a second. So on each processor a program looks at the
clock every PERIOD_S, before all others where it may, and writes down by how much it came late. What a thread loses
meanwhile on that processor is not the doing of whoever is being measured.

    started as `python -m proofs.framework.stolen_time PROCESSOR FILE` it is such a program, until it is killed
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
TOLD = struct.Struct("dd")
"""When it looked last, and how long it was late in all."""


@dataclass(frozen=True, slots=True)
class Bystander:
    """One such program, seen from outside."""

    process: "subprocess.Popen[bytes]"
    told: mmap.mmap

    def lost_s(self) -> float:
        """What its processor has lost so far, that which it is losing at this moment included."""
        while True:
            last_s, late_s = TOLD.unpack_from(self.told)
            if (last_s, late_s) == TOLD.unpack_from(self.told):
                return float(late_s + max(0.0, time.monotonic() - last_s - PERIOD_S))

    @property
    def has_begun(self) -> bool:
        """It has looked at the clock once."""
        return bool(TOLD.unpack_from(self.told)[0])


class StolenTime:
    """Bystanders on all processors."""

    def __init__(self, bystanders: Sequence[Bystander]) -> None:
        self.bystanders = bystanders

    def now(self) -> tuple[float, ...]:
        """What each processor has lost so far."""
        return tuple(one.lost_s() for one in self.bystanders)

    def since(self, before: tuple[float, ...]) -> float:
        """The most that any processor has lost since then."""
        return max(now_s - before_s for now_s, before_s in zip(self.now(), before, strict=True))


@contextmanager
def watched() -> Iterator[StolenTime]:
    """Bystanders for as long as the block runs."""
    with TemporaryDirectory(prefix="quire-stolen-") as folder:
        bystanders = [_started(processor, Path(folder)) for processor in sorted(os.sched_getaffinity(0))]
        try:
            for one in bystanders:
                _wait_begun(one)
            yield StolenTime(bystanders)
        finally:
            for one in bystanders:
                one.process.kill()
                one.process.wait()
                one.told.close()


def _started(processor: int, folder: Path) -> Bystander:
    path = folder / str(processor)
    path.write_bytes(bytes(TOLD.size))
    process = subprocess.Popen(
        [sys.executable, "-m", "proofs.framework.stolen_time", str(processor), str(path)], cwd=ROOT
    )
    return Bystander(process, _mapped(path))


def _wait_begun(bystander: Bystander) -> None:
    while not bystander.has_begun:
        if bystander.process.poll() is not None:
            raise RuntimeError(f"a bystander ended with code {bystander.process.returncode} before it began")
        time.sleep(0.01)


def _mapped(path: Path) -> mmap.mmap:
    with path.open("r+b") as file:
        return mmap.mmap(file.fileno(), TOLD.size)


def stand_by(processor: int, path: Path) -> None:
    """Look at the clock on this processor until somebody ends it."""
    os.sched_setaffinity(0, {processor})
    with suppress(PermissionError):  # then it is late by what others compute there, too, and less is said of us
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    told, late_s, last_s = _mapped(path), 0.0, time.monotonic()
    while True:
        time.sleep(PERIOD_S)
        now_s = time.monotonic()
        late_s += max(0.0, now_s - last_s - PERIOD_S)
        last_s = now_s
        TOLD.pack_into(told, 0, last_s, late_s)


if __name__ == "__main__":
    stand_by(int(sys.argv[1]), Path(sys.argv[2]))
