"""Converts a GGUF model's weights to a safetensors file next to its config, for torch, which needs safetensors.

Tensors are streamed a few rows at a time, so memory use does not grow with the model. The file appears atomically.
"""

import json
import os
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.checkpoints.cache import UNFINISHED, check_free_space
from quire.checkpoints.checkpoint import Checkpoint
from quire.checkpoints.progress import Progress, quiet
from quire.checkpoints.stored_tensors import StoredTensor, dequantize, opened_weights, read_rows
from quire.checkpoints.weights import SINGLE_NAME
from quire.errors import CheckpointError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

CHUNK_VALUES = 2 * 1024 * 1024
"""Values per chunk: 8 MiB as 32-bit floats, about 40 MiB with the temporaries of dequantization."""
CONVERTIBLE_TYPES = ("llama", "mistral", "qwen2", "qwen3")
"""Model types whose tensors differ only by name between GGUF and Hugging Face format."""
HALF_TYPES = {"F16": 2, "BF16": 2}
"""Types that are copied unchanged, and their bytes per value; all other types become F32."""


def ensure_safetensors(checkpoint: Checkpoint, progress: Progress = quiet) -> Path:
    """Return the directory with safetensors weights, converted if necessary. Raises CheckpointError."""
    final = checkpoint.directory / SINGLE_NAME
    if checkpoint.source == checkpoint.directory or final.is_file():
        return checkpoint.directory
    if (model_type := checkpoint.config["model_type"]) not in CONVERTIBLE_TYPES:
        message = f"for torch, expected a GGUF model of type {' or '.join(CONVERTIBLE_TYPES)}, got {model_type}"
        raise CheckpointError(f"{message}; use the CPU backend, or the model's safetensors")
    try:
        _write(checkpoint, final, progress)
    except OSError as error:
        message = f"cannot convert weights of {checkpoint.name} into {checkpoint.directory}: {error.strerror or error}"
        hint = "check that the folder is writable, or set QUIRE_CACHE to another"
        raise CheckpointError(f"{message}; {hint}", code="folder_not_writable") from error
    return checkpoint.directory


def _write(checkpoint: Checkpoint, final: Path, progress: Progress) -> None:
    # Wide values first, so that every tensor is aligned for its dtype; then in source order.
    items = sorted(checkpoint.tensors.items(), key=lambda item: (-_value_bytes(item[1]), item[1].offset))
    total_bytes = sum(_out_bytes(tensor) for _, tensor in items)
    check_free_space(final.parent, total_bytes, "QUIRE_CACHE")
    done_bytes = 0
    descriptor, temporary = tempfile.mkstemp(prefix=UNFINISHED, dir=final.parent)
    try:
        with open(descriptor, "wb") as out:
            out.write(_safetensors_header(items))
            for name, tensor in items:
                for chunk in _converted_chunks(name, tensor):
                    out.write(chunk)
                    done_bytes += chunk.nbytes
                    progress(f"converting {checkpoint.source.name}", done_bytes, total_bytes)
            out.flush()
            os.fsync(out.fileno())  # after a power failure the file must not exist with missing content
        os.chmod(temporary, 0o644)  # mkstemp makes the file private; a cache may be shared
        os.replace(temporary, final)
    finally:
        Path(temporary).unlink(missing_ok=True)


def _value_bytes(tensor: StoredTensor) -> int:
    return HALF_TYPES.get(tensor.type, 4)


def _out_bytes(tensor: StoredTensor) -> int:
    return tensor.num_values * _value_bytes(tensor)


def _safetensors_header(items: list[tuple[str, StoredTensor]]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, tensor in items:
        offsets = [position, position + _out_bytes(tensor)]
        dtype = tensor.type if tensor.type in HALF_TYPES else "F32"
        entries[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": offsets}
        position = offsets[1]
    raw = json.dumps(entries, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    return struct.pack("<Q", len(raw)) + raw


def _converted_chunks(name: str, tensor: StoredTensor) -> Iterator[memoryview]:
    """Yield the tensor's rows in the output dtype, a few at a time."""
    import numpy as np

    step = max(1, CHUNK_VALUES // tensor.shape[-1])
    with opened_weights(tensor.path) as source:
        for first in range(0, tensor.num_rows, step):
            rows = read_rows(source, tensor, first, min(step, tensor.num_rows - first))
            values = _require_finite(name, dequantize(rows, tensor.type))
            output = rows if tensor.type in HALF_TYPES else values
            yield np.ascontiguousarray(output).reshape(-1).data.cast("B")


def _require_finite(name: str, values: "NDArray[np.float32]") -> "NDArray[np.float32]":
    import numpy as np

    if not np.isfinite(values).all():
        message = f"expected finite values in tensor {name!r}, got NaN or infinity; download the file again"
        raise CheckpointError(message, code="weights_not_finite")
    return values
