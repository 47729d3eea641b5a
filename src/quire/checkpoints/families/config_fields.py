"""Reading the fields of a config.json, which is a stranger's file: every value has its type and its limits."""

from collections.abc import Mapping
from typing import Any

from quire.errors import CheckpointError

MAX_SIZE = 2**31 - 1
AGAIN = "download the model again"


def refused(code: str, expected: str, way_out: str = AGAIN) -> CheckpointError:
    """The error for a config that breaks a rule."""
    return CheckpointError(f"config.json: expected {expected}; {way_out}", code=code)


def size_of(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """A whole number from 1 on."""
    value = config.get(key)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MAX_SIZE:
        raise refused(f"invalid_{key}", f"{key} to be a whole number from 1 to {MAX_SIZE:,}, got {str(value)[:40]!r}")
    return value


def count_of(config: Mapping[str, Any], key: str) -> int:
    """A whole number from 0 on; 0 if it is not there."""
    return 0 if config.get(key) in (None, 0) else size_of(config, key)


def number_of(config: Mapping[str, Any], key: str, default: float, high: float = 1e30) -> float:
    """A number above 0."""
    value = config.get(key)
    value = default if value is None else value
    if type(value) not in (int, float) or not 0 < value <= high:
        raise refused(f"invalid_{key}", f"{key} to be a number above 0, up to {high:g}, got {str(value)[:40]!r}")
    return float(value)


def flag_of(config: Mapping[str, Any], key: str) -> bool:
    """True or false; false if it is not there."""
    value = config.get(key)
    if value is not None and not isinstance(value, bool):
        raise refused(f"invalid_{key}", f"{key} to be true or false, got {str(value)[:40]!r}")
    return bool(value)


def object_of(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """An object; an empty one if it is not there."""
    value = config.get(key)
    if value is not None and not isinstance(value, dict):
        raise refused(f"invalid_{key}", f"{key} to be an object, got {str(value)[:40]!r}", "correct it")
    return value or {}


def layers_of(config: Mapping[str, Any], key: str, num_layers: int) -> list[Any] | None:
    """A list with an entry for each layer, or None."""
    value = config.get(key)
    if value is not None and (not isinstance(value, list) or len(value) < num_layers):
        raise refused(f"invalid_{key}", f"an entry of {key} for each of {num_layers} layers")
    return value
