"""The native kernels, imported when first needed."""

from functools import cache
from importlib import import_module
from types import ModuleType


@cache
def kernels() -> ModuleType:
    """`quire._native`, or ImportError where it was not built."""
    return import_module("quire._native")
