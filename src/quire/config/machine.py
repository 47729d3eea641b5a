"""Memory and CPU limits of this process, from the machine and its cgroups. Imports nothing else of quire.

A container, a systemd unit or a Kubernetes pod is limited by its cgroup or an ancestor of it, in cgroup version 1,
version 2 or a mix. /proc/self/cgroup has the process's own cgroup, /proc/self/mountinfo where its files are mounted.
File names differ between versions, so all are tried in each folder, without detecting the version.
"""

import math
import os
import platform
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

UNBOUNDED_BYTES = 1 << 60
"""A limit of at least this is no limit; cgroup version 1 writes a huge number instead of `max`."""
SHARE_FOR_MODELS = 0.5
ROOT = Path("/")
MEMORY_LIMITS = ("memory.max", "memory.high", "memory.limit_in_bytes")
"""Files with a memory limit. Swap does not count, because swapped-out weights would be read from disk in every step."""
MEMORY_USED = ("memory.current", "memory.usage_in_bytes")
FILE_PAGES = (("total_inactive_file", "total_active_file"), ("inactive_file", "active_file"))
"""Fields of file page cache, counted like `MemAvailable`; version 1's `total_` fields include child cgroups."""


@dataclass(frozen=True, slots=True)
class ProcessLimits:
    """The tightest limits of the process's own cgroup and its ancestors; None: no limit."""

    memory_bytes: int | None = None
    free_bytes: int | None = None
    """Memory that can still be allocated; page cache counts as free."""
    cpus: float | None = None
    """CPU quota, possibly fractional."""


def read_limits(root: Path = ROOT) -> ProcessLimits:
    """Read the current limits. `root` is the directory that contains /proc and the mounted cgroups."""
    folders = list(_folders(root))
    bounded = [(folder, limit) for folder in folders if (limit := _memory_limit(folder)) is not None]
    return ProcessLimits(
        min((limit for _, limit in bounded), default=None),
        min((max(0, limit - _used_bytes(folder)) for folder, limit in bounded), default=None),
        min((quota for folder in folders if (quota := _cpu_quota(folder)) is not None), default=None),
    )


def share_of_memory_bytes(share: float) -> int:
    """Return the memory in use by this process plus a share of the free memory, as for the default of `memory`."""
    return min(_resident_bytes() + int(free_memory_bytes() * share), memory_limit_bytes())


def memory_for_models_bytes() -> int:
    """Return the memory to plan for a model on this machine: half of its limit, independent of current use."""
    return int(memory_limit_bytes() * SHARE_FOR_MODELS)


def memory_limit_bytes() -> int:
    """Return the maximum memory of this process: the machine's memory or the cgroup limit."""
    total, limit = total_memory_bytes(), read_limits().memory_bytes
    return total if limit is None else min(total, limit)


def total_memory_bytes() -> int:
    """Return the physical memory of the machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def beyond_the_machine(memory_bytes: int | None, num_threads: int | None) -> Iterator[str]:
    """Yield a warning for each setting that exceeds the limits of this process."""
    if memory_bytes is not None and memory_bytes > (most := memory_limit_bytes()):
        yield (
            f"memory {memory_bytes / 2**30:,.2f} GiB exceeds the {most / 2**30:,.2f} GiB that this process can hold: "
            "if it is used, the system swaps or kills the process; set less"
        )
    if num_threads is not None and num_threads > (cpus := most_threads(len(usable_cpus()))):
        yield f"{num_threads} threads exceed the {cpus} processors that this process may use; set fewer"


def free_memory_bytes() -> int:
    """Return the memory that can be allocated without swapping."""
    free, left = memory_fields().get("MemAvailable", total_memory_bytes() // 2), read_limits().free_bytes
    return free if left is None else min(free, left)


def memory_fields() -> Mapping[str, int]:
    """Return the fields of /proc/meminfo in bytes; empty if the file does not exist."""
    words = (line.replace(":", " ").split() for line in _lines(ROOT / "proc/meminfo"))
    return {one[0]: int(one[1]) * 1024 for one in words if len(one) > 1 and one[1].isdecimal()}


def cpu_field(name: str) -> str:
    """Return a field of the first processor in /proc/cpuinfo; "" if it is missing."""
    fields = (line.partition(":") for line in _lines(ROOT / "proc/cpuinfo"))
    return next((value.strip() for field, _, value in fields if field.strip() == name), "")


def processor_name() -> str:
    """Return the processor's model name, or its architecture if that is unknown."""
    return cpu_field("model name") or platform.machine()


def usable_cpus() -> frozenset[int]:
    """Return the CPUs that this process may run on."""
    return frozenset(os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1))


def most_threads(wanted: int) -> int:
    """Return `wanted`, capped at the CPU quota rounded up, because more threads are throttled during a step."""
    quota = read_limits().cpus
    return wanted if quota is None else max(1, min(wanted, math.ceil(quota)))


def _folders(root: Path) -> Iterator[Path]:
    """The folders of the process's own cgroup and its ancestors, in each mounted hierarchy."""
    own = _own_groups(root)
    for line in _lines(root / "proc/self/mountinfo"):
        before, _, after = line.partition(" - ")
        place, kind = before.split(), after.split()
        if len(place) < 5 or len(kind) < 3 or kind[0] not in ("cgroup", "cgroup2"):
            continue
        controllers = kind[2].split(",") if kind[0] == "cgroup" else [""]
        group = next((own[name] for name in controllers if name in own), None)
        if group is not None:
            top, below = root / place[4].lstrip("/"), _below(group, place[3])
            yield from (top / one for one in (below, *below.parents))


def _own_groups(root: Path) -> Mapping[str, str]:
    """The process's cgroup paths by controller; version 2 has the empty name."""
    fields = (line.split(":", 2) for line in _lines(root / "proc/self/cgroup"))
    return {name: parts[2] for parts in fields if len(parts) == 3 for name in parts[1].split(",")}


def _below(group: str, mounted: str) -> PurePosixPath:
    """A cgroup's path relative to a mount. In a container the mount may be the process's own cgroup, or be outside the
    visible hierarchy (`/..`). The mount itself is then used."""
    path = PurePosixPath(group)
    if ".." in path.parts or not path.is_relative_to(mounted):
        return PurePosixPath()
    return path.relative_to(mounted)


def _memory_limit(folder: Path) -> int | None:
    """The tightest limit in this folder, including limits of ancestors that are not visible (version 1)."""
    found = [*(_number(folder / name) for name in MEMORY_LIMITS), _fields(folder).get("hierarchical_memory_limit")]
    return min((one for one in found if one is not None and one < UNBOUNDED_BYTES), default=None)


def _used_bytes(folder: Path) -> int:
    used = next((found for name in MEMORY_USED if (found := _number(folder / name)) is not None), 0)
    fields = _fields(folder)
    names = next((both for both in FILE_PAGES if both[0] in fields), ())
    return max(0, used - sum(fields.get(name, 0) for name in names))


def _cpu_quota(folder: Path) -> float | None:
    """The quota in CPUs: 1.5 for `150000 100000`, None for `max 100000` and -1."""
    words = " ".join(_lines(folder / "cpu.max")).split()
    quota, period = (
        (int(words[0]), int(words[1]))
        if len(words) == 2 and all(word.isdecimal() for word in words)
        else (_number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us"))
    )
    return quota / period if quota is not None and period is not None and quota > 0 and period > 0 else None


def _fields(folder: Path) -> Mapping[str, int]:
    words = (line.split() for line in _lines(folder / "memory.stat"))
    return {pair[0]: int(pair[1]) for pair in words if len(pair) == 2 and pair[1].isdecimal()}


def _number(file: Path) -> int | None:
    """The number in a file; None if the file does not exist or contains `max`."""
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text().splitlines()
    except (OSError, ValueError):
        return []


def _resident_bytes() -> int:
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")
