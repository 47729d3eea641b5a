"""Folders of results, and the commit, machine and versions of a run, for measurements and proofs."""

import os
import platform
import subprocess
import sys
import textwrap
import time
from contextlib import suppress
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PROOF_RESULTS = ROOT / "proofs" / "results"
ABILITIES = ("avx2", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8", "amx_bf16", "asimddp")
"""Instruction sets that affect speed: figures of machines with different ones cannot be compared."""
VERSIONS = (
    "quire", "torch", "numpy", "transformers", "tokenizers", "aiohttp", "uvicorn", "uvloop", "hypothesis", "mlx",
    "mlx-lm",
)  # fmt: skip
"""Packages whose versions are recorded if they are installed."""
SOURCES = ("src", "tests", "native", "benchmarks/*.py", "proofs/*.py")


def say(line: str) -> None:
    """Print a line to stderr; stdout is for the figures."""
    print(line, file=sys.stderr, flush=True)


def circumstances() -> dict[str, object]:
    """Return commit, date, machine and versions of this run."""
    return {
        "commit": _git("rev-parse", "HEAD"),
        "uncommitted_changes": bool(_git("status", "--porcelain", "--", *SOURCES)),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "machine": {
            "processor": _cpu_line("model name") or _apple_chip() or platform.machine(),
            "abilities": abilities(),
            "cores": os.cpu_count(),
            "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
            "system": platform.system(),
        },
        "versions": {"python": platform.python_version(), **_versions(*VERSIONS)},
    }


def _apple_chip() -> str:
    """Return the processor of a Mac, such as "Apple M3 Pro"; empty on other systems."""
    if sys.platform != "darwin":
        return ""
    command = ["/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()


def abilities() -> list[str]:
    """Return those of `ABILITIES` that this processor has."""
    flags = (_cpu_line("flags") or _cpu_line("Features")).split()
    return [name for name in ABILITIES if name in flags]


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True).stdout.strip()


def _cpu_line(name: str) -> str:
    """Return a field of /proc/cpuinfo; empty if the system has no such file."""
    file = Path("/proc/cpuinfo")
    for line in file.read_text().splitlines() if file.is_file() else ():
        if line.startswith(name):
            return line.partition(":")[2].strip()
    return ""


def _versions(*packages: str) -> dict[str, str]:
    versions = {}
    for package in packages:
        with suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    return versions


def wrapped(prose: str) -> list[str]:
    """Wrap a paragraph for a Markdown page: lines of at most 100 characters, links unbroken."""
    return textwrap.wrap(prose, 100, break_long_words=False, break_on_hyphens=False)
