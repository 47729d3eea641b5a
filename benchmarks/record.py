"""Where results stand, and of which commit, machine and versions they are: for measurements and proofs alike."""

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
"""Instructions that decide what arithmetic costs: figures of machines that differ in them cannot be compared."""
VERSIONS = (
    "quire", "torch", "numpy", "transformers", "tokenizers", "aiohttp", "uvicorn", "uvloop", "hypothesis", "mlx",
    "mlx-lm",
)  # fmt: skip
"""Of those that are installed."""
SOURCES = ("src", "tests", "native", "benchmarks/*.py", "proofs/*.py")


def say(line: str) -> None:
    """On stderr: stdout is for the figures."""
    print(line, file=sys.stderr, flush=True)


def circumstances() -> dict[str, object]:
    """Commit, machine and versions: without them a number means nothing."""
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
    """Apple M3 Pro, or whatever this Mac says; nothing elsewhere."""
    if sys.platform != "darwin":
        return ""
    words = ["/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string"]
    return subprocess.run(words, capture_output=True, text=True).stdout.strip()


def abilities() -> list[str]:
    """Those of `ABILITIES` that this processor has; ARM's list has another name."""
    has = (_cpu_line("flags") or _cpu_line("Features")).split()
    return [one for one in ABILITIES if one in has]


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True).stdout.strip()


def _cpu_line(name: str) -> str:
    """What the system says of its processor under this name; nothing where it has no such file."""
    file = Path("/proc/cpuinfo")
    for line in file.read_text().splitlines() if file.is_file() else ():
        if line.startswith(name):
            return line.partition(":")[2].strip()
    return ""


def _versions(*packages: str) -> dict[str, str]:
    found = {}
    for package in packages:
        with suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


def wrapped(prose: str) -> list[str]:
    """A paragraph as it stands in a document: lines of at most 100 characters, links in one piece."""
    return textwrap.wrap(prose, 100, break_long_words=False, break_on_hyphens=False)
