"""The memory of the process that many tests share: what a file keeps ends with the file, and no test that opens a model
depends on what others left behind."""

import ctypes
import gc
from collections.abc import Callable
from functools import cache
from typing import Any, ParamSpec, TypeVar

from quire.config.machine import memory_budget_bytes

AMPLE_BYTES = 16 << 30
"""A budget for tests of small models that are not about memory: the pools stay as small as the longest sequences are,
and whatever else the process holds, it is there."""
_Given = ParamSpec("_Given")
_Made = TypeVar("_Made")
_kept: list[Any] = []


def budget_bytes(needed_bytes: int) -> int:
    """A budget for a model that takes at most so much, beside all the process holds already."""
    return memory_budget_bytes(0.0) + needed_bytes


def kept_for_this_file(make: Callable[_Given, _Made]) -> Callable[_Given, _Made]:
    """Make each thing once for the tests of a file, not for the rest of the run: models are hundreds of megabytes."""
    kept = cache(make)
    _kept.append(kept)
    return kept  # type: ignore[return-value]


def give_back_memory() -> None:
    """Forget what was kept for a file, and what is held in circles; the system gets what the allocator keeps of it."""
    for one in _kept:
        one.cache_clear()
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
    if trim is not None:
        trim(0)
