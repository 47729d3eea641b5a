"""The extension `quire._native`: whether it can be used here, and the module itself.

It is built where there is a C++ compiler. A process has one OpenMP runtime: where torch is used, it brings its own, and
this module, imported after torch, shares it.
"""

import re
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

RUNTIME = "libgomp.so.1"
BUNDLED = Path(__file__).parents[2] / "_libs" / RUNTIME
"""In wheels only."""
IDLE_OWNERS = ("/sentencepiece.libs/",)
"""Packages that bring a runtime along and start no threads here: sentencepiece uses its own in training alone."""


class Availability(NamedTuple):
    """Whether the kernels can be used here, and if not, why not."""

    is_available: bool
    reason: str
    isa: str | None = None
    """avx512vnni, avx512, avxvnni, avx2, neondot or portable."""


@cache
def available() -> Availability:
    """Looked up once per process."""
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
    """The OpenMP runtimes mapped into this process that may compute; one is right. Empty where the system does not
    tell."""
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return []
    found = set(re.findall(r"\S*/lib(?:gomp|iomp5|omp)\b[^/\s]*\.so\S*", maps))
    return sorted(path for path in found if not any(owner in path for owner in IDLE_OWNERS))


@cache
def kernels() -> ModuleType:
    """The extension, or ImportError. On a machine without an OpenMP runtime the wheel's own is loaded."""
    try:
        return import_module("quire._native")  # only where it was built
    except ImportError as error:
        if RUNTIME not in str(error) or not BUNDLED.is_file():
            raise
    import ctypes  # noqa: PLC0415 - seldom needed

    ctypes.CDLL(str(BUNDLED), mode=ctypes.RTLD_GLOBAL)
    return import_module("quire._native")
