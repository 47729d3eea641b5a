"""Access to the native extension `quire._native`, and whether it can be used in this process.

The extension is built if a C++ compiler is available. A process must have only one OpenMP runtime: torch bundles one,
and the extension shares torch's runtime if it is imported after torch.
"""

import os
import re
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from quire.errors import ConfigError

INSTRUCTION_SET_VARIABLE = "QUIRE_INSTRUCTION_SET"
RUNTIME_NAME = "libgomp.so.1"
BUNDLED_RUNTIME = Path(__file__).parents[2] / "_libs" / RUNTIME_NAME
"""The OpenMP runtime bundled in wheels; missing in other installations."""
IDLE_PACKAGES = ("/sentencepiece.libs/",)
"""Packages with an OpenMP runtime of their own that starts no threads: sentencepiece needs it only for training."""


class Availability(NamedTuple):
    """Whether the kernels can be used here; if not, the reason."""

    is_available: bool
    reason: str
    isa: str | None = None
    """Instruction set: avx512vnni, avx512, avxvnni, avx2, neondot or portable."""


def use_instruction_set(name: str) -> None:
    """Select the kernels' instruction set for this process and its child processes. The kernels read the environment
    variable at first use. Raises ConfigError if the set is unavailable."""
    if name == "auto":
        return
    os.environ[INSTRUCTION_SET_VARIABLE] = name
    native = availability()
    if native.isa != name:
        reason = native.reason if native.isa is None else f"this process already uses the kernels for {native.isa}"
        raise ConfigError(f"cannot set instruction_set to {name}: {reason}", ("instruction_set",))


@cache
def availability() -> Availability:
    """Return whether the kernels can be used; determined once per process."""
    try:
        isa = kernels().isa()
    except ImportError as error:
        return Availability(False, f"built without a compiler: quire._native is missing ({error})")
    except RuntimeError as error:
        return Availability(False, str(error))
    runtimes = openmp_runtimes()
    if len(runtimes) > 1:
        return Availability(False, f"two OpenMP runtimes would share the cores: {', '.join(runtimes)}")
    return Availability(True, f"kernels for {isa}", isa)


def openmp_runtimes() -> list[str]:
    """Return the OpenMP runtimes mapped into this process that may compute; more than one is an error. Empty if the
    operating system does not report them."""
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return []
    paths = set(re.findall(r"\S*/lib(?:gomp|iomp5|omp)\b[^/\s]*\.so\S*", maps))
    return sorted(path for path in paths if not any(package in path for package in IDLE_PACKAGES))


@cache
def kernels() -> ModuleType:
    """Import the extension, with the wheel's OpenMP runtime if the machine has none. Raises ImportError."""
    try:
        return import_module("quire._native")  # missing if it was not built
    except ImportError as error:
        if RUNTIME_NAME not in str(error) or not BUNDLED_RUNTIME.is_file():
            raise
    import ctypes  # noqa: PLC0415 - rarely needed

    ctypes.CDLL(str(BUNDLED_RUNTIME), mode=ctypes.RTLD_GLOBAL)
    return import_module("quire._native")
