"""How much memory this machine has to give, for settings that are a share of it. Reads the system, nothing of quire."""

import os
from pathlib import Path

UNBOUNDED_BYTES = 1 << 62
SHARE_FOR_MODELS = 0.5


def share_of_memory_bytes(share: float) -> int:
    """What the process holds now and this share of what is free: the same rule as when no memory is set."""
    return _resident_bytes() + int(_free_bytes() * share)


def memory_for_models_bytes() -> int:
    """What a model may need so that it fits this machine: half of its memory, whatever is in use at the moment."""
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())
    except (OSError, ValueError):  # no such file, or no limit
        limit = UNBOUNDED_BYTES
    return int(min(total, limit) * SHARE_FOR_MODELS)


def _free_bytes() -> int:
    """What could be taken without swapping, within the limits of a container."""
    try:
        fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        free = int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    return max(0, min(free, _free_in_container_bytes()))


def _free_in_container_bytes() -> int:
    folder = Path("/sys/fs/cgroup")
    try:
        limit = int((folder / "memory.max").read_text())
        return limit - int((folder / "memory.current").read_text())
    except (OSError, ValueError):  # no such files, or no limit
        return UNBOUNDED_BYTES


def _resident_bytes() -> int:
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")
