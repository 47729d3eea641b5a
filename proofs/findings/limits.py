"""Sections of the machine's limits: do the memory and threads that quire plans stay within those of its cgroup?

A *made-up* cgroup is a tree of files, mounted in the namespace of one process over `/proc/PID/cgroup`,
`/proc/PID/mountinfo` and `/sys/fs/cgroup`. In it we run the planning of `quire serve`, `plan` and `info`, and
`quire doctor`. Real cgroups are made below the cgroup of this process, where the machine permits it: there we run
`quire serve` of a small model with its worker.
"""

import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from benchmarks.record import ROOT, say
from benchmarks.servers import plain_environment
from proofs.api.load import started
from proofs.framework.proof import Proof, section
from quire.config.machine import read_limits
from tests.support.machine.cgroup_trees import Hierarchy, memory_and_cpu, write_tree
from tests.support.models.tiny_models import make_directory

GIB = 1 << 30
MOUNT_AND_RUN = (
    "mount --bind {tree}/sys/fs/cgroup /sys/fs/cgroup && mount --bind {tree}/proc/self/cgroup /proc/$$/cgroup && "
    "mount --bind {tree}/proc/self/mountinfo /proc/$$/mountinfo && exec {command}"
)
PROBE = """
import json
from quire.backends.kernels.threads import use_threads
from quire.backends.memory_plan import budget
from quire.config import ModelSettings, machine
planned = [budget(ModelSettings()), machine.memory_for_models_bytes(), machine.free_memory_bytes()]
print(json.dumps([*planned, use_threads(None)]))
"""
V1_MEMORY, V1_CPU = "/sys/fs/cgroup/memory", "/sys/fs/cgroup/cpu,cpuacct"
GROUP_BYTES = 2 * GIB
GROUP_CPUS = 0.5


@dataclass(frozen=True, slots=True)
class Case:
    """A tree of cgroups, and how much memory and how many processors a process in it may use."""

    name: str
    hierarchies: Sequence[Hierarchy]
    num_bytes: int
    cpus: float


@dataclass(slots=True)
class Excess:
    """What plans had beyond their limits, summed over all cases."""

    num_bytes: int = 0
    num_threads: int = 0
    num_cases: int = 0

    def add(self, name: str, plans: Sequence[int], num_threads: int, max_bytes: int, cpus: float) -> None:
        """Count one process: its plans in bytes, of which the largest is judged, and how many threads compute."""
        extra_bytes = max(0, max(plans) - max_bytes)
        extra_threads = max(0, num_threads - math.ceil(cpus))
        self.num_cases += 1
        self.num_bytes += extra_bytes
        self.num_threads += extra_threads
        if extra_bytes or extra_threads:
            say(f"    {name}: {plans} bytes of {max_bytes} and {num_threads} threads for {cpus} processors")


# -- made-up cgroups ---------------------------------------------------------------------------------------------------


def _v1(group_path: str, files: Mapping[str, Mapping[str, str]], root: str = "/") -> list[Hierarchy]:
    """Both controllers of cgroup version 1; `files` has the files of each group by its path below the mount."""
    flat = {f"{group}/{name}".lstrip("/"): text for group, named in files.items() for name, text in named.items()}
    memory = {path: text for path, text in flat.items() if "memory." in path}
    cpu = {path: text for path, text in flat.items() if "cpu." in path}
    return [
        Hierarchy(group_path, V1_MEMORY, root, "memory", memory),
        Hierarchy(group_path, V1_CPU, root, "cpu,cpuacct", cpu),
        Hierarchy("/init.scope", "/sys/fs/cgroup/systemd", "/", "name=systemd"),
    ]


def _v2(group_path: str, files: Mapping[str, Mapping[str, str]]) -> list[Hierarchy]:
    flat = {f"{group}/{name}".lstrip("/"): text for group, named in files.items() for name, text in named.items()}
    return [Hierarchy(group_path, files=flat)]


def _common_cases(num_bytes: int, cpus: float) -> list[Case]:
    """Trees as systemd, Docker and Kubernetes make them."""
    v1, v2 = memory_and_cpu(1, num_bytes, cpus), memory_and_cpu(2, num_bytes, cpus)
    v1_free, v2_free = memory_and_cpu(1, None, None), memory_and_cpu(2, None, None)
    high = {"memory.max": "max", "memory.high": str(num_bytes), "memory.current": "0", "cpu.max": v2["cpu.max"]}
    mixed = [
        Hierarchy("/a", V1_MEMORY, "/", "memory", {f"a/{name}": text for name, text in v1.items()}),
        Hierarchy("/b", "/sys/fs/cgroup/unified", files={"b/cpu.max": v2["cpu.max"]}),
    ]
    service = "/system.slice/quire.service"
    trees = {
        "version 1: its own": _v1("/jobs", {"": v1_free, "jobs": v1}),
        "version 1: its parent's": _v1("/jobs/a/b", {"": v1_free, "jobs": v1, "jobs/a": v1_free}),
        "version 1: a container's": _v1("/docker/c0ffee", {"": v1}, "/docker/c0ffee"),
        "version 1: a pod's": _v1("/kubepods/pod1/c1", {"": {
            **v1_free, "memory.stat": f"hierarchical_memory_limit {num_bytes}",
            **{name: text for name, text in v1.items() if "cpu" in name}}}, "/kubepods/pod1/c1"),
        "version 2: its own": _v2("/jobs", {"jobs": v2}),
        "version 2: its parent's": _v2("/jobs/a/b", {"jobs": v2, "jobs/a": v2_free, "jobs/a/b": v2_free}),
        "version 2: a container's": _v2("/", {"": v2}),
        "systemd: MemoryMax= and CPUQuota=": _v2(service, {"system.slice": v2_free, service: v2}),
        "systemd: of its slice": _v2(service, {"system.slice": v2, service: v2_free}),
        "systemd: MemoryHigh=": _v2(service, {service: high}),
        "systemd on version 1": _v1(service, {"": v1_free, service: v1}),
        "both versions": mixed,
    }  # fmt: skip
    return [Case(name, tree, num_bytes, cpus) for name, tree in trees.items()]


def _random_case(dice: Random) -> Case:
    """Nested groups; each may have a memory limit and a quota of processors."""
    version, depth = dice.choice((1, 2)), dice.randint(1, 4)
    names = [f"g{number}" for number in range(depth)]
    limits = [
        (dice.choice((None, dice.randint(GIB // 2, 8 * GIB))), dice.choice((None, dice.choice((0.2, 0.5, 1.0, 1.5)))))
        for _ in range(depth)
    ]
    files = {"/".join(names[: number + 1]): memory_and_cpu(version, *pair) for number, pair in enumerate(limits)}
    group_path = "/" + "/".join(names)
    tree = _v1(group_path, files) if version == 1 else _v2(group_path, files)
    min_bytes = min((num_bytes for num_bytes, _ in limits if num_bytes is not None), default=1 << 60)
    min_cpus = min((cpus for _, cpus in limits if cpus is not None), default=1e9)
    return Case(f"drawn {limits}", tree, min_bytes, min_cpus)


def _run_in_tree(tree: Path, command: Sequence[str]) -> str:
    """The output of a process that sees this tree as its cgroup."""
    script = MOUNT_AND_RUN.format(tree=tree, command=" ".join(f"'{word}'" for word in command))
    env = {**plain_environment(), "PYTHONPATH": str(ROOT / "src"), "XDG_CONFIG_HOME": str(tree)}
    process = subprocess.run(
        ["unshare", "--mount", "bash", "-c", script], env=env, cwd=ROOT, capture_output=True, text=True
    )
    if process.returncode not in (0, 1):
        raise RuntimeError(f"expected exit code 0 or 1, got {process.returncode}: {process.stderr[-1000:]}")
    return process.stdout


@section("limits: cgroups that are made up")
def made_up(proof: Proof) -> None:
    """Plan in common and in random cases; `quire doctor` runs in some of them."""
    dice, excess = proof.random, Excess()
    cases = _common_cases(num_bytes=2 * GIB, cpus=0.5)
    for _ in range(proof.sized(quick=0, full=4)):
        cases += _common_cases(num_bytes=dice.randint(GIB, 6 * GIB), cpus=1.0)
    cases += [_random_case(dice) for _ in range(proof.sized(quick=12, full=100))]
    for number, case in enumerate(cases):
        tree = write_tree(proof.folder / f"tree-{number}", case.hierarchies)
        *plans, num_threads = json.loads(_run_in_tree(tree, (sys.executable, "-c", PROBE)))
        excess.add(case.name, plans, num_threads, case.num_bytes, case.cpus)
    for number, case in enumerate(cases[: proof.sized(quick=3, full=12)]):
        facts = json.loads(
            _run_in_tree(proof.folder / f"tree-{number}", (sys.executable, "-m", "quire", "doctor", "--json"))
        )
        names = {advice["name"] for advice in facts["advice"]}
        if not {"container-memory", "container-cpus"} <= names:
            excess.num_bytes += facts["memory_bytes"]
            say(f"    {case.name}: quire doctor does not name the limits, only {names}")
        excess.add(f"doctor, {case.name}", [facts["free_bytes"]], 0, case.num_bytes, case.cpus)
    proof.report("limits_cases", excess.num_cases)
    proof.equals("limits_missed", excess.num_bytes, 0, "bytes planned beyond limits")
    proof.equals("threads_over_quota", excess.num_threads, 0, "beyond the quota rounded up")


# -- real cgroups ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Controller:
    """The folder of this process in a real hierarchy, and the files by which limits are set in a group below it."""

    folder: Path
    limits: Mapping[str, str] = field(default_factory=dict)


def _controllers() -> list[Controller]:
    """The controllers of version 1, where we can make groups below our own. In version 2, to divide our group we would
    have to leave it first."""
    groups = {parts[1]: parts[2] for parts in (line.split(":", 2) for line in _lines("/proc/self/cgroup"))}
    limits = {
        "memory": {"memory.limit_in_bytes": str(GROUP_BYTES)},
        "cpu": {"cpu.cfs_period_us": "100000", "cpu.cfs_quota_us": str(int(GROUP_CPUS * 100_000))},
    }
    controllers = []
    for names, group in groups.items():
        for name in names.split(","):
            folder = Path("/sys/fs/cgroup") / names / group.lstrip("/")
            if name in limits and os.access(folder / "cgroup.procs", os.W_OK):
                controllers.append(Controller(folder, limits[name]))
    return controllers


def _lines(path: str) -> list[str]:
    with suppress(OSError):
        return Path(path).read_text().splitlines()
    return []


@contextmanager
def _groups(controllers: Sequence[Controller], *, is_parents: bool) -> Iterator[list[Path]]:
    """Make a group with limits in each hierarchy; yields these groups or, with `is_parents`, groups made below them."""
    folders: list[Path] = []
    try:
        for controller in controllers:
            top = controller.folder / f"quire-limits-{os.getpid()}"
            top.mkdir()
            folders.append(top)
            for name, text in controller.limits.items():
                (top / name).write_text(text)
            if is_parents:
                (top / "below").mkdir()
                folders.append(top / "below")
        yield [folder for folder in folders if folder.name == "below" or not is_parents]
    finally:
        for folder in reversed(folders):
            folder.rmdir()


@section("limits: real cgroups")
def real(proof: Proof) -> None:
    """A server and its worker in a group of 2 GiB and half a processor; the limits are the group's or its parent's."""
    controllers, excess = _controllers(), Excess()
    proof.report("limits_real_controllers", len(controllers), "0: we may make no group on this machine")
    model = make_directory(proof.folder / "model")
    for is_parents in (False, True) if controllers else ():
        with _groups(controllers, is_parents=is_parents) as groups:
            enter = " && ".join(f"echo $$ > {group}/cgroup.procs" for group in groups)
            before = ("bash", "-c", f'{enter} && exec "$@"', "entered")
            *plans, num_threads = json.loads(
                subprocess.run([*before, sys.executable, "-c", PROBE], cwd=ROOT, capture_output=True, check=True).stdout
            )
            # There is no limit of memory, or of processors, if we may make no group in its hierarchy.
            max_bytes = GROUP_BYTES if any("memory" in str(one) for one in groups) else 1 << 60
            cpus = GROUP_CPUS if any("/cpu" in str(one) for one in groups) else 1e9
            excess.add("planned", plans, num_threads, max_bytes, cpus)
            with started(proof.folder, str(model), module="quire serve", before=before) as server:
                excess.add("served", [_planned_bytes(server.lines)], 0, max_bytes, cpus)
                server.stop()
    limits = read_limits()
    proof.report("limits_of_this_process", sum(one is not None for one in (limits.memory_bytes, limits.cpus)))
    proof.equals("limits_missed_real", excess.num_bytes, 0, "bytes planned beyond limits")
    proof.equals("threads_over_quota_real", excess.num_threads, 0, "beyond the quota rounded up")


def _planned_bytes(lines: Sequence[str]) -> int:
    """The budget that the server logs."""
    budget = next(match for line in lines if (match := re.search(r"memory (\d+\.\d+) GiB: model", line)))
    return int(float(budget[1]) * GIB)
