"""A model's tensors from its files to float32, a few rows at a time. Nothing that can execute is ever read."""

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from quire.backends.kernels.arrays import Floats
from quire.backends.kernels.products import PIECE_ROWS
from quire.checkpoints.stored_tensors import FLOAT_BYTES, StoredTensor, numbers_of, opened_weights, read_rows
from quire.errors import CheckpointError

PIECE_VALUES = 2 << 20
"""Numbers read at once: 8 MiB as float32."""


class WeightReader:
    """Finds tensors by name and reads them, checking every shape."""

    def __init__(self, tensors: Mapping[str, StoredTensor], on_read: Callable[[int], None]) -> None:
        self._unread = dict(tensors)
        self._on_read = on_read

    @property
    def num_values(self) -> int:
        """Numbers in all tensors that nobody has read yet."""
        return sum(tensor.num_values for tensor in self._unread.values())

    @property
    def names(self) -> frozenset[str]:
        """Tensors that nobody has read yet."""
        return frozenset(self._unread)

    def has(self, name: str) -> bool:
        """Whether such a tensor is there and unread."""
        return name in self._unread

    def forget(self, name: str) -> None:
        """Pass over a tensor that the model does not need."""
        self._unread.pop(name, None)

    def vector(self, names: Sequence[str], sizes: Sequence[int]) -> Floats:
        """Tensors of one dimension, one after the other."""
        parts = [self._take(name, (size,)) for name, size in zip(names, sizes, strict=True)]
        return np.concatenate([self._numbers(part, 0, 1)[0] for part in parts])

    def pieces(self, names: Sequence[str], sizes: Sequence[int], num_in: int) -> Iterator[Floats]:
        """Matrices of equally long rows as one, one below the other: one product instead of three.

        In pieces whose rows are multiples of PIECE_ROWS, but for the last; each lasts until the next is asked for.
        """
        tensors = [self._take(name, (size, num_in)) for name, size in zip(names, sizes, strict=True)]
        left, num_rows = sum(sizes), max(1, PIECE_VALUES // (num_in * PIECE_ROWS)) * PIECE_ROWS
        piece = np.empty((min(left, num_rows), num_in), np.float32)
        filled = 0
        for tensor, size in zip(tensors, sizes, strict=True):
            first = 0
            while first < size:
                count = min(size - first, len(piece) - filled)
                piece[filled : filled + count] = self._numbers(tensor, first, count)
                first, filled = first + count, filled + count
                if filled == len(piece):
                    yield piece
                    left, filled = left - filled, 0
                    piece = piece[: min(left, num_rows)]

    def _take(self, name: str, shape: tuple[int, ...]) -> StoredTensor:
        tensor = self._unread.pop(name, None)
        if tensor is None:
            raise CheckpointError(f"the model needs a tensor {name!r} and its files have none; download them again")
        if tensor.shape != shape:
            raise CheckpointError(
                f"tensor {name!r} must have the shape {shape} that config.json implies, {tensor.shape} is in "
                f"{tensor.path.name}; the files belong to different models"
            )
        if tensor.path.suffix == ".safetensors" and tensor.type not in FLOAT_BYTES:
            raise CheckpointError(
                f"weights must be of type {', '.join(FLOAT_BYTES)}, {name!r} in {tensor.path.name} is {tensor.type}; "
                "take a checkpoint that is not quantised, or its GGUF"
            )
        return tensor

    def _numbers(self, tensor: StoredTensor, first: int, count: int) -> Floats:
        with opened_weights(tensor.path) as file:
            raw = read_rows(file, tensor, first, count)
        numbers = numbers_of(raw, tensor.type)
        if not np.isfinite(numbers).all():
            raise CheckpointError(f"{tensor.path.name} holds weights that are NaN or infinity; download it again")
        self._on_read(raw.nbytes)
        return numbers
