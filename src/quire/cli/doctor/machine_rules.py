"""What `quire doctor` makes of the facts: what is wrong, what costs speed, and what to do about it. Pure.

A rule has a name of its own; the block that people paste into a report has names and numbers alone.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from quire.cli.doctor.machine_facts import MachineFacts

GIB = 1 << 30
LEAST_FREE_BYTES = GIB
LEAST_DISK_BYTES = 5 * GIB
LEAST_OPEN_FILES = 2_048
MANY_SWAPPED_BYTES = 256 << 20
KERNELS_FOR: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "avx512_vnni": ("avx512vnni",),
        "avx512f": ("avx512vnni", "avx512"),
        "avx_vnni": ("avx512vnni", "avx512", "avxvnni"),
        "avx2": ("avx512vnni", "avx512", "avxvnni", "avx2"),
        "asimddp": ("neondot",),
    }
)
"""Kernels that use an ability, the best ability first."""


@dataclass(frozen=True, slots=True)
class Advice:
    """One thing that is not as it could be."""

    name: str
    is_fault: bool
    """Something does not work; otherwise it only costs speed or room."""
    what: str
    hint: str


@dataclass(frozen=True, slots=True)
class Rule:
    """When it is said, and in which words."""

    name: str
    is_fault: bool
    holds: Callable[[MachineFacts], bool]
    """That there is something to say."""
    what: Callable[[MachineFacts], str]
    hint: Callable[[MachineFacts], str]


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.1f} GiB"


def _best(facts: MachineFacts) -> str | None:
    """The best ability that some kernels use."""
    return next((one for one in KERNELS_FOR if one in facts.abilities), None)


def _has_lesser_kernels(facts: MachineFacts) -> bool:
    best = _best(facts)
    return facts.isa is not None and best is not None and facts.isa not in KERNELS_FOR[best]


def _num_threads(facts: MachineFacts) -> int | None:
    given = (facts.threads_variable or "").split(",")[0]
    return int(given) if given.isdigit() else None


RULES: tuple[Rule, ...] = (
    Rule(
        "no-kernels", True,
        lambda facts: facts.isa is None and facts.num_openmp_runtimes < 2,
        lambda facts: "there are no kernels: quire was built without a C++ compiler"
        + ("; it answers through PyTorch, slowly" if facts.has_torch else ", and nothing can be answered"),
        lambda facts: "install a C++ compiler and quire again, or take a wheel that has kernels"
        + ("" if facts.has_torch else "; or install the extra torch"),
    ),
    Rule(
        "two-openmp-runtimes", True,
        lambda facts: facts.num_openmp_runtimes > 1,
        lambda facts: f"a process may have one OpenMP runtime, {facts.num_openmp_runtimes} are loaded",
        lambda _: "install quire into an environment of its own",
    ),
    Rule(
        "lesser-kernels", False, _has_lesser_kernels,
        lambda facts: f"the kernels for {facts.isa} were chosen, the processor has {_best(facts)}",
        lambda _: "unset QUIRE_NATIVE if you set it; otherwise install quire again on this machine",
    ),
    Rule(
        "little-memory", True,
        lambda facts: facts.free_bytes < LEAST_FREE_BYTES,
        lambda facts: f"{_gib(facts.free_bytes)} of {_gib(facts.memory_bytes)} memory are free, less than 1 GiB",
        lambda _: "end other programs, or choose a smaller model",
    ),
    Rule(
        "container-memory", False,
        lambda facts: facts.container_bytes is not None and facts.container_bytes < facts.memory_bytes,
        lambda facts: f"this process may hold {_gib(facts.container_bytes or 0)} of {_gib(facts.memory_bytes)}",
        lambda _: "give the container more memory, or the service (MemoryMax=), if models do not fit",
    ),
    Rule(
        "container-cpus", False,
        lambda facts: facts.cpu_quota is not None and facts.cpu_quota < facts.num_usable_cpus,
        lambda facts: f"this process may keep {facts.cpu_quota or 0:.1f} of {facts.num_usable_cpus} processors busy: "
        "more threads than that are stopped in the middle of a step",
        lambda _: "raise the container's quota, or the service's (CPUQuota=), if answers are slow",
    ),
    Rule(
        "fewer-cpus", False,
        lambda facts: facts.num_usable_cpus < facts.num_cpus,
        lambda facts: f"this process may use {facts.num_usable_cpus} of {facts.num_cpus} processors",
        lambda _: "look at taskset, or at the container's cpuset, if that is not what you want",
    ),
    Rule(
        "few-threads", False,
        lambda facts: (_num_threads(facts) or facts.num_usable_cpus) < facts.num_usable_cpus,
        lambda facts: f"OMP_NUM_THREADS is {_num_threads(facts)}, of {facts.num_usable_cpus} processors",
        lambda _: "unset it; --threads says how many quire uses",
    ),
    Rule(
        "huge-pages", False,
        lambda facts: facts.huge_pages == "never",
        lambda _: "the system gives no large pages: reading weights takes longer",
        lambda _: "as root: echo madvise > /sys/kernel/mm/transparent_hugepage/enabled",
    ),
    Rule(
        "open-files", True,
        lambda facts: facts.max_open_files is not None and facts.max_open_files < LEAST_OPEN_FILES,
        lambda facts: f"{facts.max_open_files:,} files may be open, {LEAST_OPEN_FILES:,} are needed for many clients",
        lambda _: f"raise the hard limit: ulimit -Hn {LEAST_OPEN_FILES}",
    ),
    Rule(
        "cache-folder", True,
        lambda facts: facts.cache_free_bytes is None,
        lambda _: "the folder for models cannot be written to",
        lambda _: "set QUIRE_CACHE to a folder of yours",
    ),
    Rule(
        "little-disk", True,
        lambda facts: facts.cache_free_bytes is not None and facts.cache_free_bytes < LEAST_DISK_BYTES,
        lambda facts: f"{_gib(facts.cache_free_bytes or 0)} are free where models are kept, less than 5 GiB",
        lambda _: "delete models you do not need (quire models lists them), or set QUIRE_CACHE to another disk",
    ),
    Rule(
        "temporary-folder", True,
        lambda facts: not facts.is_temp_usable,
        lambda _: "the folder for temporary files cannot hold a socket: it cannot be written to, or its path is long",
        lambda _: "set TMPDIR to a folder with a short path",
    ),
    Rule(
        "port-taken", True,
        lambda facts: not facts.is_port_free,
        lambda facts: f"port {facts.port} is taken by another program, perhaps by another quire",
        lambda facts: f"end it, or say --port {facts.port + 1}",
    ),
    Rule(
        "keys-readable", True,
        lambda facts: not facts.is_keys_file_private,
        lambda _: "others on this machine may read the file with the keys",
        lambda _: "chmod 600 it; quire config show says where it is",
    ),
    Rule(
        "powersave", False,
        lambda facts: facts.governor == "powersave",
        lambda _: "the processor is told to save power: it may run well below its speed",
        lambda _: "as root: cpupower frequency-set --governor performance",
    ),
    Rule(
        "busy", False,
        lambda facts: facts.load > 1.5 * facts.num_usable_cpus,
        lambda facts: f"other programs keep the processors busy: {facts.load:.1f} want to run on "
        f"{facts.num_usable_cpus}",
        lambda _: "look who that is, with top",
    ),
    Rule(
        "swapping", False,
        lambda facts: facts.swapped_bytes > MANY_SWAPPED_BYTES,
        lambda facts: f"{_gib(facts.swapped_bytes)} were moved to disk for want of memory",
        lambda _: "end other programs, or give quire less with --memory",
    ),
)  # fmt: skip


def advice_for(facts: MachineFacts) -> list[Advice]:
    """All there is to say, what does not work first."""
    said = [Advice(one.name, one.is_fault, one.what(facts), one.hint(facts)) for one in RULES if one.holds(facts)]
    return sorted(said, key=lambda one: not one.is_fault)


def shown(facts: MachineFacts) -> list[tuple[str, str]]:
    """The facts, for people."""
    memory = "" if facts.memory_bytes_per_s is None else f", read at {facts.memory_bytes_per_s / 1e9:.1f} GB/s"
    is_best = facts.isa is not None and not _has_lesser_kernels(facts)
    chosen = f"{facts.isa}, the best for this processor" if is_best else facts.isa or "none"
    return [
        ("quire", f"{facts.version}, Python {facts.python}"),
        ("system", facts.system),
        ("processor", facts.processor),
        ("abilities", ", ".join(sorted(facts.abilities)) or "none that matter here"),
        ("processors", f"{facts.num_usable_cpus} of {facts.num_cpus}"),
        ("memory", f"{_gib(facts.free_bytes)} of {_gib(facts.memory_bytes)} free{memory}"),
        ("kernels", chosen),
        ("PyTorch", "installed" if facts.has_torch else "not installed, and not needed"),
        ("MLX", "installed" if facts.has_mlx else "not installed; it is for Apple silicon"),
    ]


def report_block(facts: MachineFacts, advice: list[Advice]) -> list[str]:
    """Lines to paste into a report: names that stand in this file, and numbers."""
    plain = "".join(one for one in facts.processor if one.isascii() and (one.isalnum() or one in " ()@.-"))[:80]
    rate = "unknown" if facts.memory_bytes_per_s is None else f"{facts.memory_bytes_per_s / 1e9:.1f} GB/s"
    return [
        f"quire {facts.version} · Python {facts.python} · {facts.system}",
        f"{plain.strip()} · {facts.num_usable_cpus} of {facts.num_cpus} processors · kernels {facts.isa or 'none'}",
        f"abilities: {' '.join(sorted(facts.abilities)) or 'none'}",
        f"memory {_gib(facts.memory_bytes)}, free {_gib(facts.free_bytes)}, {rate}",
        f"doctor: {', '.join(one.name for one in advice) or 'nothing to say'}",
    ]
