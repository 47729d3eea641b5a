"""Strict JSON parsing for checkpoint files: NaN and duplicate keys are errors, because they are signs of damage."""

import json
from pathlib import Path
from typing import Any

from quire.errors import CheckpointError
from quire.strict_json import loads_strictly

MAX_JSON_BYTES = 128 * 1024 * 1024


def read_json_object(path: Path) -> dict[str, Any]:
    """Read the JSON object in a file. Raises CheckpointError."""
    try:
        num_bytes = path.stat().st_size
        if num_bytes > MAX_JSON_BYTES:
            sizes = f"at most {MAX_JSON_BYTES:,} bytes, got {num_bytes:,}"
            raise CheckpointError(f"expected {path.name} to have {sizes}; download the model again")
        raw = path.read_bytes()
    except OSError as error:
        message = f"{path} cannot be read: {error.strerror}; check that the file is there"
        raise CheckpointError(message, code="file_not_readable") from error
    return parse_json_object(raw, path.name)


def parse_json_object(raw: bytes, label: str) -> dict[str, Any]:
    """Parse a JSON object; errors refer to it as `label`. Raises CheckpointError."""
    try:
        value = loads_strictly(raw)
    except (ValueError, RecursionError) as error:
        message = f"{label} is not valid JSON: {str(error)[:200]}; download the model again"
        raise CheckpointError(message, code="not_json") from error
    if not isinstance(value, dict):
        message = f"expected {label} to hold a JSON object, got {type(value).__name__}; download the model again"
        raise CheckpointError(message, code="not_json_object")
    return value


def canonical_json(value: object) -> bytes:
    """Encode a value so that equal values give equal bytes, independent of key order."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()
