"""How many threads compute. One per physical core, where two only wait for each other; no more than a CPU quota has."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path

from quire.config.machine import most_threads, usable_cpus


@dataclass(slots=True)
class _Chosen:
    count: int | None = None


_CHOSEN = _Chosen()
"""Of this process, as its one pool of threads is."""


def use_threads(count: int | None) -> int:
    """Set the thread count of this process, None: the default; returns it."""
    _CHOSEN.count = count or default_threads()
    return _CHOSEN.count


def num_threads() -> int:
    """As many as were chosen; the default until then."""
    return _CHOSEN.count or default_threads()


@cache
def default_threads() -> int:
    """One per physical core, at most what a container's or a service's CPU quota is, rounded up."""
    return most_threads(physical_cores())


def physical_cores() -> int:
    """Cores this process may run on, hyper-threads counted once."""
    siblings = {_siblings(cpu) for cpu in usable_cpus()}
    return max(1, len(siblings))


def _siblings(cpu: int) -> str:
    try:
        return Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text()
    except OSError:
        return str(cpu)
