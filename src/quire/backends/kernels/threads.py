"""How many threads compute. One per physical core: two on one core only wait for each other."""

import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path


@dataclass(slots=True)
class _Chosen:
    count: int | None = None


_CHOSEN = _Chosen()
"""Of this process, as its one pool of threads is."""


def use_threads(count: int | None) -> int:
    """Set the thread count of this process, None: one per physical core; returns it."""
    _CHOSEN.count = count or physical_cores()
    return _CHOSEN.count


def num_threads() -> int:
    """As many as were chosen; one per physical core until then."""
    return _CHOSEN.count or _default()


@cache
def _default() -> int:
    return physical_cores()


def physical_cores() -> int:
    """Cores this process may run on, hyper-threads counted once."""
    usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    siblings = {_siblings(cpu) for cpu in usable}
    return max(1, len(siblings))


def _siblings(cpu: int) -> str:
    try:
        return Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text()
    except OSError:
        return str(cpu)
