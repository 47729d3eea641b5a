"""Locations of a model's tensors in its safetensors or GGUF files, and functions that read rows of a tensor as numbers.

Files are read, not memory-mapped, so that a file that shrinks causes an error and not a SIGBUS, and data that was read
does not stay in the process's memory.
"""

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from quire.errors import CheckpointError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

FLOAT_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
"""Unquantized float types and their bytes per number."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor's location and type. `shape` has rows first, as in numpy and Hugging Face."""

    path: Path
    type: str
    """The file format's name of the type: F32, BF16, Q8_0, ..."""
    shape: tuple[int, ...]
    offset: int
    num_bytes: int
    rotated_heads: int = 0
    """Number of heads whose rows are stored in interleaved RoPE order (GGUF's Llama); 0: rows are in normal order."""
    parts: "tuple[tuple[str, StoredTensor], ...]" = ()
    """Tensors of a quantized weight in safetensors (codes, scales, ...), by the last component of their names."""

    @property
    def num_values(self) -> int:
        return math.prod(self.shape)

    @property
    def num_rows(self) -> int:
        """Number of rows: the product of all dimensions but the last."""
        return math.prod(self.shape[:-1])

    @property
    def row_bytes(self) -> int:
        return self.num_bytes // max(1, self.num_rows)


@contextmanager
def opened_weights(path: Path) -> Iterator[BinaryIO]:
    """Open a file for reading. Raises CheckpointError."""
    try:
        # Non-blocking, so that a named pipe without a writer fails instead of blocking.
        file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))  # noqa: SIM115
    except OSError as error:
        message = f"{path} cannot be opened: {error.strerror}; check the path"
        raise CheckpointError(message, code="file_not_readable") from error
    with file:
        yield file


def read_exactly(file: BinaryIO, offset: int, num_bytes: int) -> bytes:
    """Read bytes from a file. Raises CheckpointError if the file is shorter than when it was checked."""
    try:
        file.seek(offset)
        raw = file.read(num_bytes)
    except OSError as error:
        raise CheckpointError(f"the model file cannot be read: {error.strerror}; check the disk") from error
    if len(raw) != num_bytes:
        message = f"the model file ended {num_bytes - len(raw):,} bytes early; wait until its download has finished"
        raise CheckpointError(message, code="file_cut_off")
    return raw


def read_rows(file: BinaryIO, tensor: StoredTensor, first: int, count: int) -> "NDArray[np.uint8]":
    """Read consecutive rows as stored bytes, [row, byte of the row]. Rows of rotated heads are put in normal order."""
    if not tensor.rotated_heads:
        return _read(file, tensor, first, count)
    head_dim = tensor.num_rows // tensor.rotated_heads
    begin, end = first // head_dim * head_dim, -(-(first + count) // head_dim) * head_dim
    return half_split(_read(file, tensor, begin, end - begin), head_dim)[first - begin : first - begin + count]


def half_split(rows: "NDArray[np.uint8]", head_dim: int) -> "NDArray[np.uint8]":
    """Reorder the rows of each head from GGUF's order (0, half, 1, half + 1, ...) to 0, 1, ..., head_dim - 1.

    RoPE rotates adjacent rows in GGUF, but rows i and i + half in Hugging Face format, where half = head_dim / 2.
    """
    num_rows, row_bytes = rows.shape
    pairs = rows.reshape(num_rows // head_dim, head_dim // 2, 2, row_bytes)
    return pairs.swapaxes(1, 2).reshape(num_rows, row_bytes)


def dequantize(rows: "NDArray[np.uint8]", kind: str) -> "NDArray[np.float32]":
    """Convert stored rows of this type to float32, exactly except for F64."""
    import numpy as np

    values: NDArray[Any]
    match kind:
        case "F32":
            values = rows.view("<f4")
        case "F64":
            values = rows.view("<f8")
        case "F16":
            values = rows.view("<f2")
        case "BF16":
            values = (rows.view("<u2").astype(np.uint32) << 16).view(np.float32)
        case _:
            from gguf import GGMLQuantizationType, quants

            with np.errstate(all="ignore"):
                values = quants.dequantize(np.ascontiguousarray(rows), GGMLQuantizationType[kind])
    with np.errstate(over="ignore"):
        return values.astype(np.float32, copy=False)


def _read(file: BinaryIO, tensor: StoredTensor, first: int, count: int) -> "NDArray[np.uint8]":
    import numpy as np

    raw = read_exactly(file, tensor.offset + first * tensor.row_bytes, count * tensor.row_bytes)
    return np.frombuffer(raw, np.uint8).reshape(count, tensor.row_bytes)
