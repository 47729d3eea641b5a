"""JSON as files of a checkpoint may contain it: bounded, finite, without doubled keys.

Python's parser takes NaN, Infinity and doubled keys in silence; a file that has them is damaged or means to mislead.
"""

import json
import math
from pathlib import Path
from typing import Any

from quire.errors import CheckpointError

MAX_JSON_BYTES = 128 * 1024 * 1024


def read_json_object(path: Path) -> dict[str, Any]:
    """The object in this file, or a CheckpointError that says what is wrong with it."""
    try:
        num_bytes = path.stat().st_size
        if num_bytes > MAX_JSON_BYTES:
            sizes = f"at most {MAX_JSON_BYTES:,} bytes, got {num_bytes:,}"
            raise CheckpointError(f"expected {path.name} to have {sizes}; download the model again")
        raw = path.read_bytes()
    except OSError as error:
        why = f"{path} cannot be read: {error.strerror}; check that the file is there"
        raise CheckpointError(why, code="file_not_readable") from error
    return parse_json_object(raw, path.name)


def parse_json_object(raw: bytes, label: str) -> dict[str, Any]:
    """The object these bytes spell; `label` names them in the error."""
    try:
        value = json.loads(
            raw.decode(), object_pairs_hook=_without_doubles, parse_constant=_refuse, parse_float=_finite
        )
    except (ValueError, RecursionError) as error:
        why = f"{label} is not valid JSON: {_short(error)}; download the model again"
        raise CheckpointError(why, code="not_json") from error
    if not isinstance(value, dict):
        rule = f"expected {label} to hold a JSON object, got {type(value).__name__}; download the model again"
        raise CheckpointError(rule, code="not_json_object")
    return value


def canonical_json(value: object) -> bytes:
    """The same bytes for equal values, whatever the order of their keys."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ValueError("duplicate key in an object")
    return value


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")


def _finite(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise ValueError(f"{digits[:20]} is out of range for a float")
    return value


def _short(error: Exception) -> str:
    return str(error)[:200]
