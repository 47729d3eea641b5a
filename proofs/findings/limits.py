"""Sections of the machine's limits: what quire plans within cgroups that are made up, and within real ones.

A made-up cgroup is a file tree that covers the files of one process in a file system of its own: `/proc/PID/cgroup`,
`/proc/PID/mountinfo` and what is mounted at `/sys/fs/cgroup`. That process plans as `quire serve`, `plan` and `info`
do, and is `quire doctor`. Real cgroups are made below this process's own, where this machine has them and lets us: a
whole `quire serve` of a small model runs there with its worker.
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
COVER = (
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
class Bounded:
    """A process that may take so much."""

    name: str
    hierarchies: Sequence[Hierarchy]
    num_bytes: int
    cpus: float


@dataclass(slots=True)
class Missed:
    """What went beyond, over all."""

    num_bytes: int = 0
    num_threads: int = 0
    num_cases: int = 0

    def add(self, name: str, planned: Sequence[int], num_threads: int, most_bytes: int, cpus: float) -> None:
        """One process: what it plans, in several ways, and how many threads compute."""
        beyond = max(0, max(planned) - most_bytes)
        too_many = max(0, num_threads - math.ceil(cpus))
        self.num_cases += 1
        self.num_bytes += beyond
        self.num_threads += too_many
        if beyond or too_many:
            say(f"    {name}: {planned} bytes of {most_bytes} and {num_threads} threads for {cpus} processors")


# -- made-up cgroups ---------------------------------------------------------------------------------------------------


def _v1(own: str, files: Mapping[str, Mapping[str, str]], root: str = "/") -> list[Hierarchy]:
    """Both controllers; files of each group by its path below the mount."""
    flat = {f"{group}/{name}".lstrip("/"): text for group, named in files.items() for name, text in named.items()}
    memory = {path: text for path, text in flat.items() if "memory." in path}
    cpu = {path: text for path, text in flat.items() if "cpu." in path}
    return [
        Hierarchy(own, V1_MEMORY, root, "memory", memory),
        Hierarchy(own, V1_CPU, root, "cpu,cpuacct", cpu),
        Hierarchy("/init.scope", "/sys/fs/cgroup/systemd", "/", "name=systemd"),
    ]


def _v2(own: str, files: Mapping[str, Mapping[str, str]]) -> list[Hierarchy]:
    flat = {f"{group}/{name}".lstrip("/"): text for group, named in files.items() for name, text in named.items()}
    return [Hierarchy(own, files=flat)]


def _named(num_bytes: int, cpus: float) -> list[Bounded]:
    """What people really have."""
    one, two = memory_and_cpu(1, num_bytes, cpus), memory_and_cpu(2, num_bytes, cpus)
    none_one, none_two = memory_and_cpu(1, None, None), memory_and_cpu(2, None, None)
    high = {"memory.max": "max", "memory.high": str(num_bytes), "memory.current": "0", "cpu.max": two["cpu.max"]}
    both = [
        Hierarchy("/a", V1_MEMORY, "/", "memory", {f"a/{name}": text for name, text in one.items()}),
        Hierarchy("/b", "/sys/fs/cgroup/unified", files={"b/cpu.max": two["cpu.max"]}),
    ]
    service = "/system.slice/quire.service"
    trees = {
        "version 1: its own": _v1("/jobs", {"": none_one, "jobs": one}),
        "version 1: its parent's": _v1("/jobs/a/b", {"": none_one, "jobs": one, "jobs/a": none_one}),
        "version 1: a container's": _v1("/docker/c0ffee", {"": one}, "/docker/c0ffee"),
        "version 1: a pod's": _v1("/kubepods/pod1/c1", {"": {
            **none_one, "memory.stat": f"hierarchical_memory_limit {num_bytes}",
            **{name: text for name, text in one.items() if "cpu" in name}}}, "/kubepods/pod1/c1"),
        "version 2: its own": _v2("/jobs", {"jobs": two}),
        "version 2: its parent's": _v2("/jobs/a/b", {"jobs": two, "jobs/a": none_two, "jobs/a/b": none_two}),
        "version 2: a container's": _v2("/", {"": two}),
        "systemd: MemoryMax= and CPUQuota=": _v2(service, {"system.slice": none_two, service: two}),
        "systemd: of its slice": _v2(service, {"system.slice": two, service: none_two}),
        "systemd: MemoryHigh=": _v2(service, {service: high}),
        "systemd on version 1": _v1(service, {"": none_one, service: one}),
        "both versions": both,
    }  # fmt: skip
    return [Bounded(name, tree, num_bytes, cpus) for name, tree in trees.items()]


def _drawn(dice: Random) -> Bounded:
    """Groups within groups, some with a limit, some with another."""
    version, depth = dice.choice((1, 2)), dice.randint(1, 4)
    names = [f"g{number}" for number in range(depth)]
    limits = [
        (dice.choice((None, dice.randint(GIB // 2, 8 * GIB))), dice.choice((None, dice.choice((0.2, 0.5, 1.0, 1.5)))))
        for _ in range(depth)
    ]
    files = {"/".join(names[: number + 1]): memory_and_cpu(version, *of_it) for number, of_it in enumerate(limits)}
    own = "/" + "/".join(names)
    tree = _v1(own, files) if version == 1 else _v2(own, files)
    least_bytes = min((one for one, _ in limits if one is not None), default=1 << 60)
    return Bounded(
        f"drawn {limits}", tree, least_bytes, min((one for _, one in limits if one is not None), default=1e9)
    )


def _within(tree: Path, command: Sequence[str]) -> str:
    """What a process prints whose cgroup is this one."""
    words = COVER.format(tree=tree, command=" ".join(f"'{word}'" for word in command))
    around = {**plain_environment(), "PYTHONPATH": str(ROOT / "src"), "XDG_CONFIG_HOME": str(tree)}
    done = subprocess.run(
        ["unshare", "--mount", "bash", "-c", words], env=around, cwd=ROOT, capture_output=True, text=True
    )
    if done.returncode not in (0, 1):
        raise RuntimeError(f"it ended with {done.returncode}: {done.stderr[-1000:]}")
    return done.stdout


@section("limits: cgroups that are made up")
def made_up(proof: Proof) -> None:
    """Every kind, then drawn ones; the doctor looks at some of them."""
    dice, missed = proof.random, Missed()
    cases = _named(2 * GIB, 0.5)
    cases += [one for _ in range(proof.sized(quick=0, full=4)) for one in _named(dice.randint(GIB, 6 * GIB), 1.0)]
    cases += [_drawn(dice) for _ in range(proof.sized(quick=12, full=100))]
    for number, one in enumerate(cases):
        tree = write_tree(proof.folder / f"tree-{number}", one.hierarchies)
        *planned, num_threads = json.loads(_within(tree, (sys.executable, "-c", PROBE)))
        missed.add(one.name, planned, num_threads, one.num_bytes, one.cpus)
    for number, one in enumerate(cases[: proof.sized(quick=3, full=12)]):
        facts = json.loads(
            _within(proof.folder / f"tree-{number}", (sys.executable, "-m", "quire", "doctor", "--json"))
        )
        says = {advice["name"] for advice in facts["advice"]}
        if not {"container-memory", "container-cpus"} <= says:
            missed.num_bytes += facts["memory_bytes"]
            say(f"    {one.name}: the doctor does not name the limits, {says}")
        missed.add(f"doctor, {one.name}", [facts["free_bytes"]], 0, one.num_bytes, one.cpus)
    proof.report("limits_cases", missed.num_cases)
    proof.equals("limits_missed", missed.num_bytes, 0, "bytes planned beyond limits")
    proof.equals("threads_over_quota", missed.num_threads, 0, "beyond the quota rounded up")


# -- real ones ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Controller:
    """The process's own folder in a real hierarchy, and how limits are written there."""

    folder: Path
    limits: Mapping[str, str] = field(default_factory=dict)


def _controllers() -> list[Controller]:
    """Of version 1, where groups can be made below our own; of version 2 a process must leave the group that is
    divided, which is not ours to do."""
    own = {parts[1]: parts[2] for parts in (line.split(":", 2) for line in _lines("/proc/self/cgroup"))}
    wanted = {
        "memory": {"memory.limit_in_bytes": str(GROUP_BYTES)},
        "cpu": {"cpu.cfs_period_us": "100000", "cpu.cfs_quota_us": str(int(GROUP_CPUS * 100_000))},
    }
    found = []
    for names, group in own.items():
        for name in names.split(","):
            folder = Path("/sys/fs/cgroup") / names / group.lstrip("/")
            if name in wanted and os.access(folder / "cgroup.procs", os.W_OK):
                found.append(Controller(folder, wanted[name]))
    return found


def _lines(path: str) -> list[str]:
    with suppress(OSError):
        return Path(path).read_text().splitlines()
    return []


@contextmanager
def _groups(controllers: Sequence[Controller], *, is_parents: bool) -> Iterator[list[Path]]:
    """A new group in each, whose own limit it is or that of the group above it; removed when all processes are gone."""
    made: list[Path] = []
    try:
        for one in controllers:
            top = one.folder / f"quire-limits-{os.getpid()}"
            top.mkdir()
            made.append(top)
            for name, text in one.limits.items():
                (top / name).write_text(text)
            if is_parents:
                (top / "below").mkdir()
                made.append(top / "below")
        yield [one for one in made if one.name == "below" or not is_parents]
    finally:
        for folder in reversed(made):
            folder.rmdir()


@section("limits: real cgroups")
def real(proof: Proof) -> None:
    """A server with its worker in a group of 2 GiB and half a processor, its own and its parent's."""
    controllers, missed = _controllers(), Missed()
    proof.report("limits_real_controllers", len(controllers), "0: this machine has none that we may use")
    model = make_directory(proof.folder / "model")
    for is_parents in (False, True) if controllers else ():
        with _groups(controllers, is_parents=is_parents) as groups:
            entered = " && ".join(f"echo $$ > {group}/cgroup.procs" for group in groups)
            before = ("bash", "-c", f'{entered} && exec "$@"', "entered")
            *planned, num_threads = json.loads(
                subprocess.run([*before, sys.executable, "-c", PROBE], cwd=ROOT, capture_output=True, check=True).stdout
            )
            # A process here has the limits of its group, unless only one of both controllers is ours to use.
            most_bytes = GROUP_BYTES if any("memory" in str(one) for one in groups) else 1 << 60
            cpus = GROUP_CPUS if any("/cpu" in str(one) for one in groups) else 1e9
            missed.add("planned", planned, num_threads, most_bytes, cpus)
            with started(proof.folder, str(model), module="quire serve", before=before) as server:
                missed.add("served", [_planned_bytes(server.lines)], 0, most_bytes, cpus)
                server.stop()
    limits = read_limits()
    proof.report("limits_of_this_process", sum(one is not None for one in (limits.memory_bytes, limits.cpus)))
    proof.equals("limits_missed_real", missed.num_bytes, 0, "bytes planned beyond limits")
    proof.equals("threads_over_quota_real", missed.num_threads, 0, "beyond the quota rounded up")


def _planned_bytes(lines: Sequence[str]) -> int:
    """The budget that the server logs."""
    found = next(match for line in lines if (match := re.search(r"memory (\d+\.\d+) GiB: model", line)))
    return int(float(found[1]) * GIB)
