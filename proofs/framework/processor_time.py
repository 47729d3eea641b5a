"""Processor time of processes, by the kernel's own clocks, in nanoseconds."""

import time
from dataclasses import dataclass

from proofs.api.load import children_of

CPUCLOCK_SCHED = 2


@dataclass(frozen=True, slots=True)
class ProcessorTime:
    """Milliseconds of processor time of a process, since it was started."""

    process: float
    """Of the process alone."""
    tree: float
    """Of the process and all its descendants."""

    def __sub__(self, other: "ProcessorTime") -> "ProcessorTime":
        return ProcessorTime(self.process - other.process, self.tree - other.tree)

    def __truediv__(self, count: float) -> "ProcessorTime":
        return ProcessorTime(self.process / count, self.tree / count)


def processor_time_of(pid: int) -> ProcessorTime:
    """The clocks of a process and its descendants, read now."""
    process_ms, pids, tree_ms = _processor_ms(pid), [pid], 0.0
    while pids:
        next_pid = pids.pop()
        tree_ms += process_ms if next_pid == pid else _processor_ms(next_pid)
        pids += children_of(next_pid)
    return ProcessorTime(process_ms, tree_ms)


def _processor_ms(pid: int) -> float:
    """The clock that clock_getcpuclockid(3) names: all threads of a process, including those that have ended."""
    try:
        return time.clock_gettime_ns((~pid << 3) | CPUCLOCK_SCHED) / 1e6
    except OSError:  # the process has ended
        return 0.0
