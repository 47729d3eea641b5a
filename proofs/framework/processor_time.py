"""Processor time of processes, by the kernel's own clocks, in nanoseconds."""

import time
from dataclasses import dataclass

from proofs.api.load import children_of

CPUCLOCK_SCHED = 2


@dataclass(frozen=True, slots=True)
class Spent:
    """Milliseconds of processor time."""

    server: float
    """The process that serves."""
    whole: float
    """It and all its children."""

    def __sub__(self, other: "Spent") -> "Spent":
        return Spent(self.server - other.server, self.whole - other.whole)

    def __truediv__(self, count: float) -> "Spent":
        return Spent(self.server / count, self.whole / count)


def spent_by(pid: int) -> Spent:
    """Since it was started."""
    own, todo, whole = _processor_ms(pid), [pid], 0.0
    while todo:
        one = todo.pop()
        whole += own if one == pid else _processor_ms(one)
        todo += children_of(one)
    return Spent(own, whole)


def _processor_ms(pid: int) -> float:
    """What clock_getcpuclockid(3) gives for a process: all its threads, also those that have ended."""
    try:
        return time.clock_gettime_ns((~pid << 3) | CPUCLOCK_SCHED) / 1e6
    except OSError:  # it has ended
        return 0.0
