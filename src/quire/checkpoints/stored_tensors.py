"""Where a model's tensors lie in its files, and their rows as numbers: safetensors and GGUF read alike.

Data is read with plain reads, not mapped: a file that shrinks meanwhile is an error and not a SIGBUS, and what has been
read does not stay in the process's memory.
"""

import math
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
"""Types of which each number stands for itself."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor's place. `shape` has rows first, as numpy and Hugging Face write it."""

    path: Path
    type: str
    """F32, BF16, Q8_0, ...: the format's own word for it."""
    shape: tuple[int, ...]
    offset: int
    num_bytes: int
    rotated_heads: int = 0
    """How many heads' rows the file keeps in interleaved order (GGUF's Llama); 0: the rows lie as they are meant."""
    parts: "tuple[tuple[str, StoredTensor], ...]" = ()
    """Of a quantised weight in safetensors: codes, scales and what else there is, by the last part of their names."""

    @property
    def num_values(self) -> int:
        return math.prod(self.shape)

    @property
    def num_rows(self) -> int:
        """How many rows there are: all dimensions but the last."""
        return math.prod(self.shape[:-1])

    @property
    def row_bytes(self) -> int:
        return self.num_bytes // max(1, self.num_rows)


@contextmanager
def opened_weights(path: Path) -> Iterator[BinaryIO]:
    """The file for reading, or a CheckpointError."""
    try:
        file = path.open("rb", buffering=0)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be opened: {error.strerror}; check the path") from error
    with file:
        yield file


def read_rows(file: BinaryIO, tensor: StoredTensor, first: int, count: int) -> "NDArray[np.uint8]":
    """Some neighbouring rows as they are stored, in the order they are meant: [row, byte of the row]."""
    if not tensor.rotated_heads:
        return _read(file, tensor, first, count)
    head = tensor.num_rows // tensor.rotated_heads
    begin, end = first // head * head, -(-(first + count) // head) * head
    return half_split(_read(file, tensor, begin, end - begin), head)[first - begin : first - begin + count]


def half_split(rows: "NDArray[np.uint8]", head_dim: int) -> "NDArray[np.uint8]":
    """Put the rows of each head back from GGUF's order (0, half, 1, half + 1, ...) into 0, 1, ..., head_dim - 1.

    GGUF rotates neighbouring rows with each other, Hugging Face row i with row i + half, half being head_dim / 2.
    """
    num_rows, row_bytes = rows.shape
    pairs = rows.reshape(num_rows // head_dim, head_dim // 2, 2, row_bytes)
    return pairs.swapaxes(1, 2).reshape(num_rows, row_bytes)


def numbers_of(rows: "NDArray[np.uint8]", kind: str) -> "NDArray[np.float32]":
    """Stored rows of this type as float32: exactly, but for F64."""
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
            from gguf import GGMLQuantizationType
            from gguf.quants import dequantize

            with np.errstate(all="ignore"):
                values = dequantize(np.ascontiguousarray(rows), GGMLQuantizationType[kind])
    with np.errstate(over="ignore"):
        return values.astype(np.float32, copy=False)


def _read(file: BinaryIO, tensor: StoredTensor, first: int, count: int) -> "NDArray[np.uint8]":
    import numpy as np

    rows = np.empty((count, tensor.row_bytes), np.uint8)
    try:
        file.seek(tensor.offset + first * tensor.row_bytes)
        left = rows.reshape(-1).data
        while left and (taken := file.readinto(left)):  # type: ignore[attr-defined]
            left = left[taken:]
    except OSError as error:
        raise CheckpointError(f"the model file cannot be read: {error.strerror}; check the disk") from error
    if len(left):
        early = f"the model file ended {len(left):,} bytes early; wait until its download has finished"
        raise CheckpointError(early, code="file_cut_off")
    return rows
