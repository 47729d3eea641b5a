"""JSON as files of a checkpoint may contain it: a file with NaN or doubled keys is damaged or means to mislead."""

import json
from pathlib import Path
from typing import Any

from quire.errors import CheckpointError
from quire.strict_json import loads_strictly

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
        value = loads_strictly(raw)
    except (ValueError, RecursionError) as error:
        why = f"{label} is not valid JSON: {str(error)[:200]}; download the model again"
        raise CheckpointError(why, code="not_json") from error
    if not isinstance(value, dict):
        rule = f"expected {label} to hold a JSON object, got {type(value).__name__}; download the model again"
        raise CheckpointError(rule, code="not_json_object")
    return value


def canonical_json(value: object) -> bytes:
    """The same bytes for equal values, whatever the order of their keys."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()
