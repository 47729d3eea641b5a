"""Rules of `quire doctor`: faults, lost speed, and what to do about them. Pure.

Each rule has a name; the block for a bug report contains names and numbers only.
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
    """One finding."""

    name: str
    is_fault: bool
    """Something does not work; otherwise it costs speed or space."""
    what: str
    hint: str


@dataclass(frozen=True, slots=True)
class Rule:
    """A condition and its message."""

    name: str
    is_fault: bool
    holds: Callable[[MachineFacts], bool]
    """Whether the advice applies."""
    what: Callable[[MachineFacts], str]
    hint: Callable[[MachineFacts], str]


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.1f} GiB"


def _best(facts: MachineFacts) -> str | None:
    return next((one for one in KERNELS_FOR if one in facts.abilities), None)


def _has_lesser_kernels(facts: MachineFacts) -> bool:
    best = _best(facts)
    return facts.isa is not None and best is not None and facts.isa not in KERNELS_FOR[best]


def _num_threads(facts: MachineFacts) -> int | None:
    word = (facts.threads_variable or "").split(",")[0]
    return int(word) if word.isdigit() else None


RULES: tuple[Rule, ...] = (
    Rule(
        "no-kernels", True,
        lambda facts: facts.isa is None and facts.num_openmp_runtimes < 2,
        lambda facts: "no kernels: quire was built without a C++ compiler"
        + ("; models run on PyTorch, slowly" if facts.has_torch else ", and no model can run"),
        lambda facts: "install a C++ compiler and reinstall quire, or use a wheel with kernels"
        + ("" if facts.has_torch else "; or install the extra torch"),
    ),
    Rule(
        "two-openmp-runtimes", True,
        lambda facts: facts.num_openmp_runtimes > 1,
        lambda facts: f"expected one OpenMP runtime in the process, got {facts.num_openmp_runtimes}",
        lambda _: "install quire into its own environment",
    ),
    Rule(
        "lesser-kernels", False, _has_lesser_kernels,
        lambda facts: f"the kernels for {facts.isa} are in use, the processor supports {_best(facts)}",
        lambda _: "unset QUIRE_NATIVE if you set it; otherwise reinstall quire on this machine",
    ),
    Rule(
        "little-memory", True,
        lambda facts: facts.free_bytes < LEAST_FREE_BYTES,
        lambda facts: f"expected 1 GiB of free memory, got {_gib(facts.free_bytes)} of {_gib(facts.memory_bytes)}",
        lambda _: "stop other programs, or choose a smaller model",
    ),
    Rule(
        "container-memory", False,
        lambda facts: facts.container_bytes is not None and facts.container_bytes < facts.memory_bytes,
        lambda facts: f"this process may use {_gib(facts.container_bytes or 0)} of {_gib(facts.memory_bytes)} memory",
        lambda _: "if models do not fit, raise the memory limit of the container or the service (MemoryMax=)",
    ),
    Rule(
        "container-cpus", False,
        lambda facts: facts.cpu_quota is not None and facts.cpu_quota < facts.num_usable_cpus,
        lambda facts: f"this process may use {facts.cpu_quota or 0:.1f} of {facts.num_usable_cpus} processors: "
        "further threads are paused in the middle of a step",
        lambda _: "if responses are slow, raise the CPU quota of the container or the service (CPUQuota=)",
    ),
    Rule(
        "fewer-cpus", False,
        lambda facts: facts.num_usable_cpus < facts.num_cpus,
        lambda facts: f"this process may use {facts.num_usable_cpus} of {facts.num_cpus} processors",
        lambda _: "if that is not intended, check taskset or the container's cpuset",
    ),
    Rule(
        "few-threads", False,
        lambda facts: (_num_threads(facts) or facts.num_usable_cpus) < facts.num_usable_cpus,
        lambda facts: f"OMP_NUM_THREADS is {_num_threads(facts)}, {facts.num_usable_cpus} processors are usable",
        lambda _: "unset it; --threads sets how many quire uses",
    ),
    Rule(
        "huge-pages", False,
        lambda facts: facts.huge_pages == "never",
        lambda _: "huge pages are disabled: reading weights takes longer",
        lambda _: "as root: echo madvise > /sys/kernel/mm/transparent_hugepage/enabled",
    ),
    Rule(
        "open-files", True,
        lambda facts: facts.max_open_files is not None and facts.max_open_files < LEAST_OPEN_FILES,
        lambda facts: f"many clients need {LEAST_OPEN_FILES:,} open files, the limit is {facts.max_open_files:,}",
        lambda _: f"raise the hard limit: ulimit -Hn {LEAST_OPEN_FILES}",
    ),
    Rule(
        "cache-folder", True,
        lambda facts: facts.cache_free_bytes is None,
        lambda _: "the folder for models is not writable",
        lambda _: "set QUIRE_CACHE to a writable folder",
    ),
    Rule(
        "little-disk", True,
        lambda facts: facts.cache_free_bytes is not None and facts.cache_free_bytes < LEAST_DISK_BYTES,
        lambda facts: f"expected at least 5 GiB free in the folder for models, got {_gib(facts.cache_free_bytes or 0)}",
        lambda _: "delete models you do not need (quire models lists them), or set QUIRE_CACHE to another disk",
    ),
    Rule(
        "temporary-folder", True,
        lambda facts: not facts.is_temp_usable,
        lambda _: "the folder for temporary files cannot hold a socket: it is not writable, or its path is too long",
        lambda _: "set TMPDIR to a folder with a short path",
    ),
    Rule(
        "port-taken", True,
        lambda facts: not facts.is_port_free,
        lambda facts: f"port {facts.port} is in use by another program, possibly another quire",
        lambda facts: f"stop it, or use --port {facts.port + 1}",
    ),
    Rule(
        "keys-readable", True,
        lambda facts: not facts.is_keys_file_private,
        lambda _: "other users of this machine can read the keys file",
        lambda _: "run chmod 600 on it; quire config show prints its path",
    ),
    Rule(
        "powersave", False,
        lambda facts: facts.governor == "powersave",
        lambda _: "the powersave governor is active: the processor may run well below its full speed",
        lambda _: "as root: cpupower frequency-set --governor performance",
    ),
    Rule(
        "busy", False,
        lambda facts: facts.load > 1.5 * facts.num_usable_cpus,
        lambda facts: f"other programs keep the processors busy: load {facts.load:.1f} on "
        f"{facts.num_usable_cpus} processors",
        lambda _: "find them with top",
    ),
    Rule(
        "swapping", False,
        lambda facts: facts.swapped_bytes > MANY_SWAPPED_BYTES,
        lambda facts: f"{_gib(facts.swapped_bytes)} of memory are swapped out to disk",
        lambda _: "stop other programs, or give quire less memory with --memory",
    ),
)  # fmt: skip


def advice_for(facts: MachineFacts) -> list[Advice]:
    """All advice that applies, faults first."""
    advice = [Advice(one.name, one.is_fault, one.what(facts), one.hint(facts)) for one in RULES if one.holds(facts)]
    return sorted(advice, key=lambda one: not one.is_fault)


def shown(facts: MachineFacts) -> list[tuple[str, str]]:
    """The facts as rows of a table."""
    memory = "" if facts.memory_bytes_per_s is None else f", read at {facts.memory_bytes_per_s / 1e9:.1f} GB/s"
    is_best = facts.isa is not None and not _has_lesser_kernels(facts)
    chosen = f"{facts.isa}, the best for this processor" if is_best else facts.isa or "none"
    return [
        ("quire", f"{facts.version}, Python {facts.python}"),
        ("system", facts.system),
        ("processor", facts.processor),
        ("abilities", ", ".join(sorted(facts.abilities)) or "none that quire uses"),
        ("processors", f"{facts.num_usable_cpus} of {facts.num_cpus}"),
        ("memory", f"{_gib(facts.free_bytes)} of {_gib(facts.memory_bytes)} free{memory}"),
        ("kernels", chosen),
        ("PyTorch", "installed" if facts.has_torch else "not installed, and not needed"),
        ("MLX", "installed" if facts.has_mlx else "not installed; it is for Apple silicon"),
    ]


def report_block(facts: MachineFacts, advice: list[Advice]) -> list[str]:
    """Lines for a bug report: rule names and numbers only."""
    plain = "".join(one for one in facts.processor if one.isascii() and (one.isalnum() or one in " ()@.-"))[:80]
    rate = "unknown" if facts.memory_bytes_per_s is None else f"{facts.memory_bytes_per_s / 1e9:.1f} GB/s"
    return [
        f"quire {facts.version} · Python {facts.python} · {facts.system}",
        f"{plain.strip()} · {facts.num_usable_cpus} of {facts.num_cpus} processors · kernels {facts.isa or 'none'}",
        f"abilities: {' '.join(sorted(facts.abilities)) or 'none'}",
        f"memory {_gib(facts.memory_bytes)}, free {_gib(facts.free_bytes)}, {rate}",
        f"doctor: {', '.join(one.name for one in advice) or 'no findings'}",
    ]
