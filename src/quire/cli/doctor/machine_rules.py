"""The rules of `quire doctor`: faults, lost speed, and a remedy for each, as pure functions of the facts. Each rule has
a name; the summary for a bug report contains only rule names and facts.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from quire.cli.doctor.machine_facts import MachineFacts

GIB = 1 << 30
FAULT, LOSS = True, False  # values of Advice.is_fault
MIN_FREE_BYTES = GIB
MIN_DISK_BYTES = 5 * GIB
MIN_OPEN_FILES = 2_048
MAX_SWAPPED_BYTES = 256 << 20
REINSTALL = "unset QUIRE_INSTRUCTION_SET if you set it; otherwise reinstall quire on this machine"
KERNELS_FOR: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "avx512_vnni": ("avx512vnni",),
        "avx512f": ("avx512vnni", "avx512"),
        "avx_vnni": ("avx512vnni", "avx512", "avxvnni"),
        "avx2": ("avx512vnni", "avx512", "avxvnni", "avx2"),
        "asimddp": ("neondot",),
    }
)
"""For each CPU feature, best first, the kernels to expect. Other kernels are slower than the CPU allows."""


@dataclass(frozen=True, slots=True)
class Advice:
    """One finding of a rule."""

    name: str
    is_fault: bool  # FAULT: something does not work; LOSS: it costs speed or memory
    what: str
    hint: str


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.1f} GiB"


def _best_feature(facts: MachineFacts) -> str | None:
    return next((feature for feature in KERNELS_FOR if feature in facts.abilities), None)


def _has_lesser_kernels(facts: MachineFacts) -> bool:
    best = _best_feature(facts)
    return facts.isa not in (None, "portable") and best is not None and facts.isa not in KERNELS_FOR[best]


def advice_for(facts: MachineFacts) -> list[Advice]:
    """Apply all rules; faults come first."""
    checks = (_check_kernels, _check_processors, _check_memory, _check_system, _check_serving)
    return sorted((item for check in checks for item in check(facts)), key=lambda item: not item.is_fault)


def _check_kernels(facts: MachineFacts) -> Iterator[Advice]:
    if facts.isa is None and facts.num_openmp_runtimes < 2:
        effect = "; models run on PyTorch, slowly" if facts.has_torch else ", and no model can run"
        hint = "install a C++ compiler and reinstall quire, or use a wheel with kernels"
        hint += "" if facts.has_torch else "; or install the extra torch"
        yield Advice("no-kernels", FAULT, f"no kernels: quire was built without a C++ compiler{effect}", hint)
    if facts.num_openmp_runtimes > 1:
        what = f"expected one OpenMP runtime in the process, got {facts.num_openmp_runtimes}"
        yield Advice("two-openmp-runtimes", FAULT, what, "install quire into its own environment")
    if _has_lesser_kernels(facts):
        what = f"the kernels for {facts.isa} are in use, but the processor supports {_best_feature(facts)}"
        yield Advice("lesser-kernels", LOSS, what, REINSTALL)
    if facts.isa == "portable":
        what = "the portable kernels are in use: they have about a tenth of the speed of those for AVX2"
        hint = "choose a small model, or a machine with AVX2, AVX-512 or ARM dot products"
        yield Advice("portable-kernels", LOSS, what, REINSTALL if _best_feature(facts) else hint)


def _check_processors(facts: MachineFacts) -> Iterator[Advice]:
    num_usable = facts.num_usable_cpus
    if facts.cpu_quota is not None and facts.cpu_quota < num_usable:
        what = f"this process may use {facts.cpu_quota:.1f} of {num_usable} processors: "
        what += "more threads are paused in the middle of a step"
        hint = "if responses are slow, raise the CPU quota of the container or the service (CPUQuota=)"
        yield Advice("container-cpus", LOSS, what, hint)
    if num_usable < facts.num_cpus:
        what = f"this process may use {num_usable} of {facts.num_cpus} processors"
        yield Advice("fewer-cpus", LOSS, what, "if that is not intended, check taskset or the container's cpuset")
    threads = (facts.threads_variable or "").split(",")[0]
    if threads.isdigit() and 0 < int(threads) < num_usable:
        what = f"OMP_NUM_THREADS is {int(threads)}, but {num_usable} processors are usable"
        yield Advice("few-threads", LOSS, what, "unset OMP_NUM_THREADS; --threads sets the number for quire")
    if facts.governor == "powersave":
        what = "the powersave governor is active: the processor may run well below its full speed"
        yield Advice("powersave", LOSS, what, "as root: cpupower frequency-set --governor performance")
    if facts.load > 1.5 * num_usable:
        what = f"other programs keep the processors busy: load {facts.load:.1f} on {num_usable} processors"
        yield Advice("busy", LOSS, what, "find these programs with top")


def _check_memory(facts: MachineFacts) -> Iterator[Advice]:
    memory = _gib(facts.memory_bytes)
    if facts.free_bytes < MIN_FREE_BYTES:
        what = f"expected 1 GiB of free memory, got {_gib(facts.free_bytes)} of {memory}"
        yield Advice("little-memory", FAULT, what, "stop other programs, or choose a smaller model")
    if facts.container_bytes is not None and facts.container_bytes < facts.memory_bytes:
        what = f"this process may use {_gib(facts.container_bytes)} of {memory} memory"
        hint = "if models do not fit, raise the memory limit of the container or the service (MemoryMax=)"
        yield Advice("container-memory", LOSS, what, hint)
    if facts.huge_pages == "never":
        hint = "as root: echo madvise > /sys/kernel/mm/transparent_hugepage/enabled"
        yield Advice("huge-pages", LOSS, "huge pages are disabled: reading weights takes longer", hint)
    if facts.swapped_bytes > MAX_SWAPPED_BYTES:
        what = f"{_gib(facts.swapped_bytes)} of memory are swapped out to disk"
        yield Advice("swapping", LOSS, what, "stop other programs, or give quire less memory with --memory")


def _check_system(facts: MachineFacts) -> Iterator[Advice]:
    if facts.max_open_files is not None and facts.max_open_files < MIN_OPEN_FILES:
        what = f"many clients need {MIN_OPEN_FILES:,} open files, but the limit is {facts.max_open_files:,}"
        yield Advice("open-files", FAULT, what, f"raise the hard limit: ulimit -Hn {MIN_OPEN_FILES}")
    if facts.cache_free_bytes is None:
        what = "the folder for models is not writable"
        yield Advice("cache-folder", FAULT, what, "set QUIRE_CACHE to a writable folder")
    elif facts.cache_free_bytes < MIN_DISK_BYTES:
        what = f"expected at least 5 GiB free in the folder for models, got {_gib(facts.cache_free_bytes)}"
        hint = "delete models you do not need (quire models lists them), or set QUIRE_CACHE to another disk"
        yield Advice("little-disk", FAULT, what, hint)
    if not facts.is_temp_usable:
        what = "the folder for temporary files cannot hold a socket: it is not writable, or its path is too long"
        yield Advice("temporary-folder", FAULT, what, "set TMPDIR to a folder with a short path")


def _check_serving(facts: MachineFacts) -> Iterator[Advice]:
    if not facts.is_port_free:
        what = f"port {facts.port} is in use by another program, possibly another quire"
        yield Advice("port-taken", FAULT, what, f"stop it, or use --port {facts.port + 1}")
    if not facts.is_keys_file_private:
        hint = "run chmod 600 on it; quire config show prints its path"
        yield Advice("keys-readable", FAULT, "other users of this machine can read the keys file", hint)


def fact_rows(facts: MachineFacts) -> list[tuple[str, str]]:
    """Format the facts as rows of a table."""
    memory = "" if facts.memory_bytes_per_s is None else f", read at {facts.memory_bytes_per_s / 1e9:.1f} GB/s"
    is_best = facts.isa not in (None, "portable") and not _has_lesser_kernels(facts)
    kernels = f"{facts.isa}, the best for this processor" if is_best else facts.isa or "none"
    return [
        ("quire", f"{facts.version}, Python {facts.python}"),
        ("system", facts.system),
        ("processor", facts.processor),
        ("CPU features", ", ".join(sorted(facts.abilities)) or "none that quire uses"),
        ("processors", f"{facts.num_usable_cpus} of {facts.num_cpus}"),
        ("memory", f"{_gib(facts.free_bytes)} of {_gib(facts.memory_bytes)} free{memory}"),
        ("kernels", kernels),
        ("PyTorch", "installed" if facts.has_torch else "not installed, and not needed"),
        ("MLX", "installed" if facts.has_mlx else "not installed; it is for Apple silicon"),
    ]


def report_block(facts: MachineFacts, advice: list[Advice]) -> list[str]:
    """Return the summary for a bug report: versions, processor, numbers and rule names, without personal data."""
    name = "".join(char for char in facts.processor if char.isascii() and (char.isalnum() or char in " ()@.-"))[:80]
    rate = "unknown" if facts.memory_bytes_per_s is None else f"{facts.memory_bytes_per_s / 1e9:.1f} GB/s"
    return [
        f"quire {facts.version} · Python {facts.python} · {facts.system}",
        f"{name.strip()} · {facts.num_usable_cpus} of {facts.num_cpus} processors · kernels {facts.isa or 'none'}",
        f"CPU features: {' '.join(sorted(facts.abilities)) or 'none'}",
        f"memory {_gib(facts.memory_bytes)}, free {_gib(facts.free_bytes)}, {rate}",
        f"doctor: {', '.join(finding.name for finding in advice) or 'no findings'}",
    ]
