"""Memory and threads are bounded by the process's own cgroup and all above it, of either version, not by the root's."""

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.backends.kernels import threads
from quire.backends.memory_plan import budget
from quire.cli.doctor.machine_facts import read_facts
from quire.config import ModelSettings, load_settings, machine
from quire.config.machine import ProcessLimits, read_limits
from tests.support.machine.cgroup_trees import Hierarchy, memory_and_cpu, write_tree

GIB = 1 << 30
V1 = "/sys/fs/cgroup/memory"
NO_LIMIT = "9223372036854771712"
levels = st.lists(
    st.tuples(st.none() | st.integers(1, 1 << 40), st.none() | st.sampled_from((0.25, 0.5, 1.0, 1.5, 2.0, 64.0))),
    min_size=1,
    max_size=4,
)


@given(version=st.sampled_from((1, 2)), found=levels, num_above=st.integers(0, 3))
def test_the_least_of_the_own_group_and_of_all_above_it_counts(
    tmp_path_factory: pytest.TempPathFactory,
    version: int,
    found: list[tuple[int | None, float | None]],
    num_above: int,
) -> None:
    """However deep, with and without the upper ones mounted, as in a container."""
    groups = ["", *(f"g{number}" for number in range(1, len(found)))]
    files = {
        "/".join([*groups[1 : number + 1], name]): text
        for number, (num_bytes, cpus) in enumerate(found)
        for name, text in memory_and_cpu(version, num_bytes, cpus).items()
    }
    unseen = "".join(f"/above{number}" for number in range(num_above))
    own = "/".join([unseen, *groups[1:]]) or "/"
    tree = Hierarchy(own, root=unseen or "/", controllers="memory,cpu,cpuacct" if version == 1 else "", files=files)
    limits = read_limits(write_tree(tmp_path_factory.mktemp("tree"), [tree]))
    assert limits.memory_bytes == min((one for one, _ in found if one is not None), default=None)
    assert limits.cpus == min((one for _, one in found if one is not None), default=None)


TREES: dict[str, tuple[list[Hierarchy], ProcessLimits]] = {
    "no limit, version 1": (
        [Hierarchy("/", V1, controllers="memory", files={"memory.limit_in_bytes": NO_LIMIT})],
        ProcessLimits(),
    ),
    "no cgroups": ([], ProcessLimits()),
    "version 1: each controller has a group of its own": (
        [
            Hierarchy("/jobs/a", V1, controllers="memory", files={"jobs/a/memory.limit_in_bytes": str(2 * GIB)}),
            Hierarchy("/b", "/sys/fs/cgroup/cpu,cpuacct", controllers="cpu,cpuacct",
                      files={"b/cpu.cfs_quota_us": "150000", "b/cpu.cfs_period_us": "100000"}),
            Hierarchy("/", "/sys/fs/cgroup/unified"),
        ],
        ProcessLimits(2 * GIB, 2 * GIB, 1.5),
    ),
    "version 1: what lies above a container's mount": (
        [Hierarchy("/docker/c0ffee", V1, "/docker/c0ffee", "memory", {
            "memory.limit_in_bytes": NO_LIMIT, "memory.usage_in_bytes": str(GIB),
            "memory.stat": f"inactive_file 5\nhierarchical_memory_limit {3 * GIB}\n"
                           f"total_inactive_file {GIB // 4}\ntotal_active_file {GIB // 4}"})],
        ProcessLimits(3 * GIB, 2 * GIB + GIB // 2),
    ),
    "a service: MemoryMax= and CPUQuota= of its slice and its own": (
        [Hierarchy("/system.slice/quire.service", files={
            "system.slice/memory.max": str(8 * GIB), "system.slice/memory.current": str(7 * GIB),
            "system.slice/memory.stat": "anon 1", "system.slice/cpu.max": "max 100000",
            "system.slice/quire.service/memory.max": str(4 * GIB),
            "system.slice/quire.service/memory.current": str(GIB),
            "system.slice/quire.service/cpu.max": "250000 100000"})],
        ProcessLimits(4 * GIB, GIB, 2.5),
    ),
    "MemoryHigh=": (
        [Hierarchy("/a", files={"a/memory.max": "max", "a/memory.high": str(GIB), "a/memory.current": "0"})],
        ProcessLimits(GIB, GIB),
    ),
    "a container that sees its own group as the root": (
        [Hierarchy("/", files={"memory.max": str(GIB), "memory.current": str(GIB // 2), "cpu.max": "50000 100000",
                               "memory.stat": f"inactive_file {GIB // 8}\nactive_file {GIB // 8}"})],
        ProcessLimits(GIB, GIB - GIB // 4, 0.5),
    ),
    "a mount of a group that has no place in the names we see": (
        [Hierarchy("/../../other", root="/..", files={"memory.max": str(GIB), "memory.current": "0"})],
        ProcessLimits(GIB, GIB),
    ),
    "more in use than is allowed": (
        [Hierarchy("/", files={"memory.max": str(GIB), "memory.current": str(2 * GIB)})],
        ProcessLimits(GIB, 0),
    ),
    "both versions, memory in one and processors in the other": (
        [
            Hierarchy("/a", V1, controllers="memory", files={"memory.limit_in_bytes": str(GIB)}),
            Hierarchy("/b", "/sys/fs/cgroup/unified", files={"b/cpu.max": "100000 100000"}),
        ],
        ProcessLimits(GIB, GIB, 1.0),
    ),
    "files that are not what they should be": (
        [Hierarchy("/", files={"memory.max": "many", "cpu.max": "1 0", "memory.stat": "a\nb c\n1 2 3"})],
        ProcessLimits(),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TREES)
def test_limits_are_found_where_containers_and_services_have_them(name: str, tmp_path: Path) -> None:
    hierarchies, wanted = TREES[name]
    assert read_limits(write_tree(tmp_path, hierarchies)) == wanted


def test_a_machine_without_proc_has_no_limits(tmp_path: Path) -> None:
    assert read_limits(tmp_path) == ProcessLimits()


def test_what_is_planned_and_what_the_doctor_says_stay_within_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "read_limits", lambda: ProcessLimits(2 * GIB, GIB, 1.5))
    assert budget(ModelSettings()) <= 2 * GIB
    assert machine.memory_budget_bytes(1.0) <= 2 * GIB
    assert machine.memory_for_models_bytes() <= GIB
    assert read_facts(load_settings({}, environ={})).free_bytes <= GIB


def test_threads_are_at_most_the_quota_rounded_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(8)))
    monkeypatch.setattr(threads, "_siblings", str)
    for quota, wanted in ((None, 8), (0.1, 1), (1.0, 1), (1.5, 2), (7.2, 8), (64.0, 8)):
        limits = ProcessLimits(cpus=quota)
        monkeypatch.setattr(machine, "read_limits", lambda limits=limits: limits)
        threads.default_threads.cache_clear()
        assert threads.default_threads() == wanted
    threads.default_threads.cache_clear()
