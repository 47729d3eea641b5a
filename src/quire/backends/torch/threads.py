"""How many threads compute. One per physical core: two on one core only wait for each other."""

import os
from pathlib import Path

import torch


def use_threads(num_threads: int | None) -> int:
    """Set torch's thread count for this process; returns it."""
    count = num_threads or physical_cores()
    torch.set_num_threads(count)
    return count


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
