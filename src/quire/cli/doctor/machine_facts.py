"""Facts about this machine for `quire doctor`, read once. A fact that cannot be read is None. `machine_rules` turns the
facts into advice.
"""

import os
import platform
import re
import resource
import socket
import stat
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from quire import __version__
from quire.config import Settings
from quire.config.machine import (
    cpu_field,
    free_memory_bytes,
    memory_fields,
    processor_name,
    read_limits,
    total_memory_bytes,
    usable_cpus,
)
from quire.errors import QuireError

T = TypeVar("T")
CPU_FEATURES = ("avx2", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8", "asimd", "asimddp")
MAX_TEMP_PATH_BYTES = 70
"""Maximum path length of the temporary folder: worker sockets are created there, and the OS limits their paths."""


@dataclass(frozen=True, slots=True)
class MachineFacts:
    """All facts, read at the same time."""

    version: str
    python: str
    system: str
    processor: str
    abilities: frozenset[str]
    """The CPU's features among `CPU_FEATURES`."""
    num_cpus: int
    num_usable_cpus: int
    """CPUs in this process's affinity mask."""
    cpu_quota: float | None
    """CPU quota of the container or service; None: no quota."""
    governor: str | None
    load: float
    """Load average over one minute."""
    memory_bytes: int
    free_bytes: int
    container_bytes: int | None
    """Memory limit of the container or service; None: no limit."""
    swapped_bytes: int
    huge_pages: str | None
    """always, madvise or never."""
    max_open_files: int | None
    """The hard limit; None: unlimited."""
    cache_free_bytes: int | None
    """Free space in the cache folder; None: the folder is not writable."""
    is_temp_usable: bool
    """Whether a worker's socket can be created in the folder for temporary files."""
    port: int
    is_port_free: bool
    is_keys_file_private: bool
    isa: str | None
    """Instruction set of the loaded kernels; None: no kernels."""
    num_openmp_runtimes: int
    has_torch: bool
    has_mlx: bool
    threads_variable: str | None
    """The value of OMP_NUM_THREADS."""
    memory_bytes_per_s: float | None


def read_facts(settings: Settings) -> MachineFacts:
    """Read all facts; measuring the memory bandwidth takes about a second."""
    from quire.backends.kernels.bandwidth import bandwidth_bytes_per_s
    from quire.backends.kernels.extension import availability, openmp_runtimes, use_instruction_set

    use_instruction_set(settings.model.instruction_set)
    memory, limits = memory_fields(), read_limits()
    hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return MachineFacts(
        version=__version__,
        python=platform.python_version(),
        system=_system(),
        processor=processor_name(),
        abilities=frozenset((cpu_field("flags") or cpu_field("Features")).split()).intersection(CPU_FEATURES),
        num_cpus=os.cpu_count() or 1,
        num_usable_cpus=len(usable_cpus()),
        cpu_quota=limits.cpus,
        governor=_text("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"),
        load=os.getloadavg()[0],
        memory_bytes=total_memory_bytes(),
        free_bytes=free_memory_bytes(),
        container_bytes=limits.memory_bytes,
        swapped_bytes=memory.get("SwapTotal", 0) - memory.get("SwapFree", 0),
        huge_pages=_bracketed_option("/sys/kernel/mm/transparent_hugepage/enabled"),
        max_open_files=None if hard_limit == resource.RLIM_INFINITY else hard_limit,
        cache_free_bytes=_cache_free_bytes(),
        is_temp_usable=_is_temp_usable(),
        port=settings.server.port,
        is_port_free=_is_free(settings.server.host, settings.server.port),
        is_keys_file_private=_is_private(settings),
        isa=availability().isa,
        num_openmp_runtimes=len(openmp_runtimes()),
        has_torch=_has("torch"),
        has_mlx=_has("mlx_lm"),
        threads_variable=os.environ.get("OMP_NUM_THREADS"),
        memory_bytes_per_s=bandwidth_bytes_per_s(),
    )


def _system() -> str:
    """Return the system's name and version numbers only, because the rest of a release string may contain a user's
    name."""
    version = re.match(r"\d+(\.\d+)*", platform.release())
    return f"{platform.system()} {version[0] if version else ''} {platform.machine()}".replace("  ", " ")


def _text(path: str) -> str | None:
    return _or_none(lambda: Path(path).read_text().strip(), OSError)


def _or_none(read: Callable[[], T], *failures: type[Exception]) -> T | None:
    try:
        return read()
    except failures:
        return None


def _bracketed_option(path: str) -> str | None:
    """Return the selected option in brackets, as in `always [madvise] never`."""
    option = re.search(r"\[(\w+)\]", _text(path) or "")
    return option[1] if option else None


def _cache_free_bytes() -> int | None:
    from quire.checkpoints.cache import cache_folder

    def free_bytes() -> int | None:
        folder = cache_folder()
        existing = next(path for path in (folder, *folder.parents) if path.exists())
        filesystem = os.statvfs(existing)
        return filesystem.f_bavail * filesystem.f_frsize if os.access(existing, os.W_OK | os.X_OK) else None

    return _or_none(free_bytes, OSError, QuireError)


def _is_temp_usable() -> bool:
    try:
        folder = tempfile.gettempdir()
    except OSError:  # no temporary folder is writable
        return False
    return len(os.fsencode(folder)) <= MAX_TEMP_PATH_BYTES


def _is_free(host: str, port: int) -> bool:
    try:
        with socket.create_server((host, port), reuse_port=False):
            return True
    except OSError:
        return False


def _is_private(settings: Settings) -> bool:
    """Return whether the keys file is missing or readable only by its owner."""
    mode = _or_none(lambda: settings.server.keys_path().stat().st_mode, OSError, QuireError)
    return mode is None or not mode & (stat.S_IRWXG | stat.S_IRWXO)


def _has(package: str) -> bool:
    from importlib.util import find_spec

    return find_spec(package) is not None
