"""The number of compute threads: one per physical core (hyper-threads do not help), at most the CPU quota."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path

from quire.config.machine import cap_threads, usable_cpus


@dataclass(slots=True)
class _ThreadCount:
    count: int | None = None


_THREAD_COUNT = _ThreadCount()
"""The thread count set for this process, which has one thread pool."""


def use_threads(count: int | None) -> int:
    """Set the thread count of this process (None: the default) and return it."""
    _THREAD_COUNT.count = count or default_threads()
    return _THREAD_COUNT.count


def num_threads() -> int:
    """Return the thread count that was set, or the default."""
    return _THREAD_COUNT.count or default_threads()


@cache
def default_threads() -> int:
    """Return one thread per physical core, at most the CPU quota of the container or service (rounded up)."""
    return cap_threads(physical_cores())


def physical_cores() -> int:
    """Return the number of cores this process may run on, hyper-threads counted once."""
    siblings = {_siblings(cpu) for cpu in usable_cpus()}
    return max(1, len(siblings))


def _siblings(cpu: int) -> str:
    try:
        return Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text()
    except OSError:
        return str(cpu)
