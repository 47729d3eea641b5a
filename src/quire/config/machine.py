"""Memory and CPU limits of this process, from the machine and the process's cgroups. Imports nothing else of quire.

A container, a systemd unit or a Kubernetes pod is limited by its cgroup or an ancestor of it, in cgroup version 1,
version 2 or a mix. /proc/self/cgroup has the path of this cgroup, /proc/self/mountinfo the folders of cgroup files.
File names differ between versions, so all are tried in each folder, without detecting the version.
"""

import math
import os
import platform
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

UNBOUNDED_BYTES = 1 << 60
"""A value of at least this means no limit: cgroup version 1 has a huge number where version 2 has `max`."""
SHARE_FOR_MODELS = 0.5
ROOT = Path("/")
MEMORY_LIMITS = ("memory.max", "memory.high", "memory.limit_in_bytes")
"""Files with a memory limit. Swap does not count, because swapped-out weights would be read from disk in every step."""
MEMORY_IN_USE = ("memory.current", "memory.usage_in_bytes")
FILE_PAGES = (("total_inactive_file", "total_active_file"), ("inactive_file", "active_file"))
"""Fields of memory.stat: page cache, which counts as free. Version 1's `total_` fields include child cgroups."""


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


def memory_budget_bytes(share: float) -> int:
    """Return a value of the setting `memory`: what this process uses now plus a share of the free memory, capped."""
    return min(_resident_bytes() + int(free_memory_bytes() * share), memory_limit_bytes())


def memory_for_models_bytes() -> int:
    """Return the memory to assume for models when none is set: half of this process's limit, whatever is in use."""
    return int(memory_limit_bytes() * SHARE_FOR_MODELS)


def memory_limit_bytes() -> int:
    """Return the maximum memory of this process: the machine's memory or the cgroup limit."""
    total, limit = total_memory_bytes(), read_limits().memory_bytes
    return total if limit is None else min(total, limit)


def total_memory_bytes() -> int:
    """Return the physical memory of the machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def limit_warnings(memory_bytes: int | None, num_threads: int | None) -> Iterator[str]:
    """Yield a warning for each setting that exceeds the limits of this process."""
    if memory_bytes is not None and memory_bytes > (limit := memory_limit_bytes()):
        yield (
            f"memory {memory_bytes / 2**30:,.2f} GiB exceeds the process limit of {limit / 2**30:,.2f} GiB: the system "
            "may swap or kill the process; set memory to at most this limit"
        )
    if num_threads is not None and num_threads > (cpus := cap_threads(len(usable_cpus()))):
        yield f"{num_threads} threads exceed the {cpus} processors this process may use; set threads to at most {cpus}"


def free_memory_bytes() -> int:
    """Return the memory that can be allocated without swapping."""
    free, unused = memory_fields().get("MemAvailable", total_memory_bytes() // 2), read_limits().free_bytes
    return free if unused is None else min(free, unused)


def memory_fields() -> Mapping[str, int]:
    """Return the fields of /proc/meminfo in bytes; empty if the file does not exist."""
    fields = (line.replace(":", " ").split() for line in _lines(ROOT / "proc/meminfo"))
    return {words[0]: int(words[1]) * 1024 for words in fields if len(words) > 1 and words[1].isdecimal()}


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


def cap_threads(num_threads: int) -> int:
    """Cap the number at the CPU quota, rounded up, because the system would throttle more threads during a step."""
    quota = read_limits().cpus
    return num_threads if quota is None else max(1, min(num_threads, math.ceil(quota)))


def _folders(root: Path) -> Iterator[Path]:
    """The folders of the process's own cgroup and its ancestors, in each mounted hierarchy."""
    groups = _own_groups(root)
    for line in _lines(root / "proc/self/mountinfo"):
        mount, _, filesystem = line.partition(" - ")
        mount_fields, fs_fields = mount.split(), filesystem.split()
        if len(mount_fields) < 5 or len(fs_fields) < 3 or fs_fields[0] not in ("cgroup", "cgroup2"):
            continue
        controllers = fs_fields[2].split(",") if fs_fields[0] == "cgroup" else [""]
        group = next((groups[name] for name in controllers if name in groups), None)
        if group is not None:
            mount_point, path = root / mount_fields[4].lstrip("/"), _path_in_mount(group, mount_fields[3])
            yield from (mount_point / folder for folder in (path, *path.parents))


def _own_groups(root: Path) -> Mapping[str, str]:
    """The process's cgroup paths by controller; version 2 has the empty name."""
    fields = (line.split(":", 2) for line in _lines(root / "proc/self/cgroup"))
    return {name: parts[2] for parts in fields if len(parts) == 3 for name in parts[1].split(",")}


def _path_in_mount(group: str, mount_root: str) -> PurePosixPath:
    """A cgroup's path relative to a mount. In a container, the cgroup may be outside the mount (`/..`) or be the mount
    itself; the mount itself is then used."""
    path = PurePosixPath(group)
    if ".." in path.parts or not path.is_relative_to(mount_root):
        return PurePosixPath()
    return path.relative_to(mount_root)


def _memory_limit(folder: Path) -> int | None:
    """The tightest limit in this folder, including limits of ancestors that are not visible (version 1)."""
    values = [*(_number(folder / name) for name in MEMORY_LIMITS), _stat(folder).get("hierarchical_memory_limit")]
    return min((value for value in values if value is not None and value < UNBOUNDED_BYTES), default=None)


def _used_bytes(folder: Path) -> int:
    num_bytes = next((value for name in MEMORY_IN_USE if (value := _number(folder / name)) is not None), 0)
    fields = _stat(folder)
    names = next((pair for pair in FILE_PAGES if pair[0] in fields), ())
    return max(0, num_bytes - sum(fields.get(name, 0) for name in names))


def _cpu_quota(folder: Path) -> float | None:
    """The quota in CPUs: 1.5 for `150000 100000`, None for `max 100000` and -1."""
    words = " ".join(_lines(folder / "cpu.max")).split()
    quota, period = (
        (int(words[0]), int(words[1]))
        if len(words) == 2 and all(word.isdecimal() for word in words)
        else (_number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us"))
    )
    return quota / period if quota is not None and period is not None and quota > 0 and period > 0 else None


def _stat(folder: Path) -> Mapping[str, int]:
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
