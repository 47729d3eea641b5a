"""Memory and CPU limits of this process, from the machine and its cgroups. Imports nothing else of quire.

A container, a systemd unit and a Kubernetes pod are bounded by a cgroup or by one above it, of version 1, version 2 or
some of both. /proc/self/cgroup names the process's own cgroup, /proc/self/mountinfo the place of its files. File
names differ between versions, so all are tried in each folder, without detecting the version.
"""

import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

UNBOUNDED_BYTES = 1 << 60
"""Larger numbers mean no limit: version 1 has no other value for that."""
SHARE_FOR_MODELS = 0.5
ROOT = Path("/")
MEMORY_LIMITS = ("memory.max", "memory.high", "memory.limit_in_bytes")
"""Without swap: a swapped-out model would be read from disk in every step."""
MEMORY_USED = ("memory.current", "memory.usage_in_bytes")
FILE_PAGES = (("total_inactive_file", "total_active_file"), ("inactive_file", "active_file"))
"""Page cache of files, as `MemAvailable` counts it; version 1's totals include the groups below."""


@dataclass(frozen=True, slots=True)
class ProcessLimits:
    """The tightest limits of the process's own cgroup and all above it; None: no limit."""

    memory_bytes: int | None = None
    free_bytes: int | None = None
    """Memory that can still be allocated; page cache counts as free."""
    cpus: float | None = None
    """CPU quota, possibly fractional."""


def read_limits(root: Path = ROOT) -> ProcessLimits:
    """The current limits. `root` contains /proc and the mounted cgroups."""
    folders = list(_folders(root))
    bounded = [(folder, limit) for folder in folders if (limit := _memory_limit(folder)) is not None]
    return ProcessLimits(
        min((limit for _, limit in bounded), default=None),
        min((max(0, limit - _used_bytes(folder)) for folder, limit in bounded), default=None),
        min((quota for folder in folders if (quota := _cpu_quota(folder)) is not None), default=None),
    )


def share_of_memory_bytes(share: float) -> int:
    """Memory in use by this process, plus this share of the free memory: the same rule as the default of memory."""
    return min(_resident_bytes() + int(free_memory_bytes() * share), memory_limit_bytes())


def memory_for_models_bytes() -> int:
    """Memory for a model that fits this machine: half of its memory, independent of current use."""
    return int(memory_limit_bytes() * SHARE_FOR_MODELS)


def memory_limit_bytes() -> int:
    """The most memory that this process can hold."""
    total, limit = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), read_limits().memory_bytes
    return total if limit is None else min(total, limit)


def beyond_the_machine(memory_bytes: int | None, num_threads: int | None) -> Iterator[str]:
    """A warning for each limit that is set above what this process may use."""
    if memory_bytes is not None and memory_bytes > (most := memory_limit_bytes()):
        yield (
            f"memory {memory_bytes / 2**30:,.2f} GiB exceeds the {most / 2**30:,.2f} GiB that this process can hold: "
            "if it is used, the system swaps or kills the process; set less"
        )
    if num_threads is not None and num_threads > (cpus := most_threads(len(usable_cpus()))):
        yield f"{num_threads} threads exceed the {cpus} processors that this process may use; set fewer"


def free_memory_bytes() -> int:
    """Memory that can be allocated without swapping."""
    try:
        fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        free = int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    left = read_limits().free_bytes
    return free if left is None else min(free, left)


def usable_cpus() -> frozenset[int]:
    """The processors that this process may run on."""
    return frozenset(os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1))


def most_threads(wanted: int) -> int:
    """`wanted`, but at most the CPU quota rounded up: threads beyond it are throttled in the middle of a step."""
    quota = read_limits().cpus
    return wanted if quota is None else max(1, min(wanted, math.ceil(quota)))


def _folders(root: Path) -> Iterator[Path]:
    """The process's own group and all above it, in each hierarchy that is mounted."""
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
    """The process's groups by controller; version 2 has the empty name."""
    fields = (line.split(":", 2) for line in _lines(root / "proc/self/cgroup"))
    return {name: parts[2] for parts in fields if len(parts) == 3 for name in parts[1].split(",")}


def _below(group: str, mounted: str) -> PurePosixPath:
    """A group's path under a mount. In a container the mount may be the process's own group, or one outside the visible
    hierarchy (`/..`): then the mount itself is used."""
    path = PurePosixPath(group)
    if ".." in path.parts or not path.is_relative_to(mounted):
        return PurePosixPath()
    return path.relative_to(mounted)


def _memory_limit(folder: Path) -> int | None:
    """The tightest limit in this folder, including version 1's limit of groups that are not visible."""
    found = [*(_number(folder / name) for name in MEMORY_LIMITS), _fields(folder).get("hierarchical_memory_limit")]
    return min((one for one in found if one is not None and one < UNBOUNDED_BYTES), default=None)


def _used_bytes(folder: Path) -> int:
    used = next((found for name in MEMORY_USED if (found := _number(folder / name)) is not None), 0)
    fields = _fields(folder)
    names = next((both for both in FILE_PAGES if both[0] in fields), ())
    return max(0, used - sum(fields.get(name, 0) for name in names))


def _cpu_quota(folder: Path) -> float | None:
    """`max 100000` and -1: no quota; `150000 100000`: 1.5."""
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
    """None if there is no such file, or it contains `max`."""
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
