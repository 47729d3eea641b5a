"""Weights from safetensors files to tensors, one at a time. Nothing that can execute is ever read.

A file is opened anew for every slice that is copied: an open file is mapped, and what has been touched of a mapping
counts as resident memory until it is closed. So loading takes the model and a few megabytes, never the model twice.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from quire.errors import CheckpointError

SLICE_BYTES = 32 << 20
DTYPES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}


@dataclass(frozen=True, slots=True)
class TensorLocation:
    """Where a tensor is and what it looks like."""

    file: Path
    shape: tuple[int, ...]
    item_bytes: int


class WeightReader:
    """Finds tensors by name in a checkpoint's files and copies them, checking every shape."""

    def __init__(self, files: Sequence[Path], dtype: torch.dtype, on_read: Callable[[int], None]) -> None:
        self._dtype = dtype
        self._on_read = on_read
        self._unread: dict[str, TensorLocation] = {}
        for file in files:
            self._unread |= _places(file)

    @property
    def num_values(self) -> int:
        """Numbers in all tensors."""
        return sum(math.prod(place.shape) for place in self._unread.values())

    @property
    def largest_values(self) -> int:
        """Numbers in the largest one."""
        return max((math.prod(place.shape) for place in self._unread.values()), default=0)

    @property
    def names(self) -> frozenset[str]:
        """Tensors that nobody has read yet."""
        return frozenset(self._unread)

    def has(self, name: str) -> bool:
        """Whether such a tensor is there and unread."""
        return name in self._unread

    def read(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """A copy of the tensor, in the type the model computes in."""
        return self.read_joined([name], [shape])

    def read_joined(self, names: Sequence[str], shapes: Sequence[tuple[int, ...]]) -> torch.Tensor:
        """Several tensors with equal trailing sizes, one below the other: one product instead of three."""
        whole = torch.empty(sum(shape[0] for shape in shapes), *shapes[0][1:], dtype=self._dtype)
        first = 0
        for name, shape in zip(names, shapes, strict=True):
            self._copy(name, shape, whole[first : first + shape[0]])
            first += shape[0]
        return whole

    def forget(self, name: str) -> None:
        """Pass over a tensor that the model does not need."""
        self._unread.pop(name, None)

    def _copy(self, name: str, shape: tuple[int, ...], out: torch.Tensor) -> None:
        place = self._unread.pop(name, None)
        if place is None:
            raise CheckpointError(f"the model needs a tensor {name!r} and its files have none; download them again")
        if place.shape != shape:
            raise CheckpointError(
                f"tensor {name!r} must have the shape {shape} that config.json implies, {place.shape} is in "
                f"{place.file.name}; the files belong to different models"
            )
        row_bytes = max(1, place.item_bytes * (out[0].numel() if out.dim() > 1 else 1))
        step = max(1, SLICE_BYTES // row_bytes)
        for first in range(0, shape[0], step):
            end = min(first + step, shape[0])
            try:
                with safe_open(place.file, framework="pt") as file:
                    out[first:end] = file.get_slice(name)[first:end]
            except (SafetensorError, OSError, RuntimeError, ValueError) as error:
                raise CheckpointError(
                    f"tensor {name!r} of {place.file.name} cannot be read: {error}; download it again"
                ) from error
            self._on_read((end - first) * row_bytes)


def _places(file: Path) -> dict[str, TensorLocation]:
    try:
        with safe_open(file, framework="pt") as opened:
            found = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 - not a dict
            places = {name: (tuple(one.get_shape()), one.get_dtype()) for name, one in found.items()}
    except (SafetensorError, OSError, RuntimeError, ValueError) as error:
        raise CheckpointError(f"{file.name} is not a readable safetensors file: {error}; download it again") from error
    for name, (_, dtype) in places.items():
        if dtype not in DTYPES:
            raise CheckpointError(
                f"weights must be of type {', '.join(DTYPES)}, {name!r} in {file.name} is {dtype}; "
                "take a checkpoint that is not quantised, or its GGUF"
            )
    return {name: TensorLocation(file, shape, DTYPES[dtype]) for name, (shape, dtype) in places.items()}
