"""Validated reading of config.json, which is untrusted: each value must have its type and be within its limits."""

from collections.abc import Mapping
from typing import Any

from quire.errors import CheckpointError

MAX_SIZE = 2**31 - 1
AGAIN = "download the model again"


def refused(code: str, expected: str, way_out: str = AGAIN) -> CheckpointError:
    """Return the error for a config that violates a rule."""
    return CheckpointError(f"config.json: expected {expected}; {way_out}", code=code)


def size_of(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """Read an integer of at least 1. Raises CheckpointError otherwise."""
    value = config.get(key)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MAX_SIZE:
        raise refused(f"invalid_{key}", f"{key} to be a whole number from 1 to {MAX_SIZE:,}, got {str(value)[:40]!r}")
    return value


def count_of(config: Mapping[str, Any], key: str) -> int:
    """Read an integer of at least 0; 0 if missing."""
    return 0 if config.get(key) in (None, 0) else size_of(config, key)


def number_of(config: Mapping[str, Any], key: str, default: float, high: float = 1e30) -> float:
    """Read a number above 0, up to `high`. Raises CheckpointError otherwise."""
    value = config.get(key)
    value = default if value is None else value
    if type(value) not in (int, float) or not 0 < value <= high:
        raise refused(f"invalid_{key}", f"{key} to be a number above 0, up to {high:g}, got {str(value)[:40]!r}")
    return float(value)


def flag_of(config: Mapping[str, Any], key: str) -> bool:
    """Read a boolean; false if missing."""
    value = config.get(key)
    if value is not None and not isinstance(value, bool):
        raise refused(f"invalid_{key}", f"{key} to be true or false, got {str(value)[:40]!r}")
    return bool(value)


def object_of(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Read an object; empty if missing."""
    value = config.get(key)
    if value is not None and not isinstance(value, dict):
        raise refused(f"invalid_{key}", f"{key} to be an object, got {str(value)[:40]!r}", "correct it")
    return value or {}
