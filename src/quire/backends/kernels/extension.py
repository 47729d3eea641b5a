"""Access to the native extension `quire._native`, and whether it can be used here.

It is built if a C++ compiler is available. A process must have one OpenMP runtime: torch brings its own, and this
extension shares that runtime if it is imported after torch.
"""

import os
import re
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from quire.errors import ConfigError

VARIABLE = "QUIRE_INSTRUCTION_SET"
RUNTIME = "libgomp.so.1"
BUNDLED = Path(__file__).parents[2] / "_libs" / RUNTIME
"""The OpenMP runtime bundled in wheels; missing in other installations."""
IDLE_OWNERS = ("/sentencepiece.libs/",)
"""Packages whose bundled OpenMP runtime starts no threads here: sentencepiece uses its runtime only for training."""


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
    os.environ[VARIABLE] = name
    found = available()
    if found.isa != name:
        got = found.reason if found.isa is None else f"this process already uses the kernels for {found.isa}"
        raise ConfigError(f"cannot set instruction_set to {name}: {got}", ("instruction_set",))


@cache
def available() -> Availability:
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
    found = set(re.findall(r"\S*/lib(?:gomp|iomp5|omp)\b[^/\s]*\.so\S*", maps))
    return sorted(path for path in found if not any(owner in path for owner in IDLE_OWNERS))


@cache
def kernels() -> ModuleType:
    """Import the extension, with the wheel's OpenMP runtime if the machine has none. Raises ImportError."""
    try:
        return import_module("quire._native")  # missing if it was not built
    except ImportError as error:
        if RUNTIME not in str(error) or not BUNDLED.is_file():
            raise
    import ctypes  # noqa: PLC0415 - rarely needed

    ctypes.CDLL(str(BUNDLED), mode=ctypes.RTLD_GLOBAL)
    return import_module("quire._native")
