"""Cgroups as file trees: /proc/self/cgroup, /proc/self/mountinfo and the folders that they name."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Hierarchy:
    """One mounted tree of groups, and the process's own group in it."""

    group: str
    """As /proc/self/cgroup has it."""
    mount: str = "/sys/fs/cgroup"
    root: str = "/"
    """The group that is mounted there."""
    controllers: str = ""
    """Of version 1; none: version 2."""
    files: Mapping[str, str] = field(default_factory=dict)
    """By path below the mount."""


def write_tree(root: Path, hierarchies: Sequence[Hierarchy]) -> Path:
    """Write them below a folder that stands for /; returns it."""
    (root / "proc/self").mkdir(parents=True, exist_ok=True)
    groups, mounts = [], ["22 1 8:1 / / rw,relatime - ext4 /dev/root rw"]
    for number, one in enumerate(hierarchies, 30):
        folder = root / one.mount.lstrip("/")
        folder.mkdir(parents=True, exist_ok=True)
        kind = f"cgroup cgroup rw,{one.controllers}" if one.controllers else "cgroup2 cgroup2 rw,nsdelegate"
        groups.append(f"{number - 29 if one.controllers else 0}:{one.controllers}:{one.group}")
        mounts.append(f"{number} 22 0:{number} {one.root} {one.mount} rw,nosuid shared:{number} - {kind}")
        for path, text in one.files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(f"{text}\n")
    (root / "proc/self/cgroup").write_text("\n".join(groups) + "\n")
    (root / "proc/self/mountinfo").write_text("\n".join(mounts) + "\n")
    return root


def memory_and_cpu(version: int, num_bytes: int | None, cpus: float | None) -> dict[str, str]:
    """The files of one group with these limits, None: the kernel's word for no limit."""
    if version == 2:
        limits = {"memory.max": num_bytes, "cpu.max": None if cpus is None else int(cpus * 100_000)}
        written = {name: "max" if value is None else str(value) for name, value in limits.items()}
        return {**written, "cpu.max": f"{written['cpu.max']} 100000", "memory.current": "0", "memory.stat": "anon 0"}
    return {
        "memory.limit_in_bytes": str(9223372036854771712 if num_bytes is None else num_bytes),
        "memory.usage_in_bytes": "0",
        "cpu.cfs_quota_us": str(-1 if cpus is None else int(cpus * 50_000)),
        "cpu.cfs_period_us": "50000",
    }
