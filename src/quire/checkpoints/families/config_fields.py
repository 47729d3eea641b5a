"""Validated reading of config.json, which is untrusted: each value must have its type and be within its limits."""

from collections.abc import Mapping
from typing import Any

from quire.errors import CheckpointError

MAX_SIZE = 2**31 - 1
DOWNLOAD_HINT = "download the model again"


def config_error(code: str, expected: str, hint: str = DOWNLOAD_HINT) -> CheckpointError:
    """Return the error for a config.json that is invalid or unsupported; `expected` ends with what was read instead."""
    return CheckpointError(f"config.json: expected {expected}; {hint}", code=code)


def size_of(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """Read an integer of at least 1. Raises CheckpointError otherwise."""
    value = default if config.get(key) is None else config[key]
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MAX_SIZE:
        expected = f"{key} to be a whole number from 1 to {MAX_SIZE:,}, got {str(value)[:40]!r}"
        raise config_error(f"invalid_{key}", expected)
    return value


def count_of(config: Mapping[str, Any], key: str) -> int:
    """Read an integer of at least 0; 0 if missing."""
    return 0 if config.get(key) in (None, 0) else size_of(config, key)


def number_of(config: Mapping[str, Any], key: str, default: float, maximum: float = 1e30) -> float:
    """Read a number above 0, up to `maximum`. Raises CheckpointError otherwise."""
    value = default if config.get(key) is None else config[key]
    if type(value) not in (int, float) or not 0 < value <= maximum:
        expected = f"{key} to be a number above 0, up to {maximum:g}, got {str(value)[:40]!r}"
        raise config_error(f"invalid_{key}", expected)
    return float(value)


def flag_of(config: Mapping[str, Any], key: str) -> bool:
    """Read a boolean; false if missing."""
    value = config.get(key)
    if value is not None and not isinstance(value, bool):
        raise config_error(f"invalid_{key}", f"{key} to be true or false, got {str(value)[:40]!r}")
    return bool(value)


def object_of(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Read an object; empty if missing."""
    value = config.get(key)
    if value is not None and not isinstance(value, dict):
        raise config_error(f"invalid_{key}", f"{key} to be an object, got {str(value)[:40]!r}", "correct it")
    return value or {}
