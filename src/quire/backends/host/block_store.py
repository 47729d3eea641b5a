"""The block store of a backend: for each layer an array of keys and an array of values, divided into blocks.

The bytes of a block are, layer by layer, its keys and then its values, in the order that the backend's store
documents, in the store's dtype and the machine's byte order. Block 0 is the null block.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from quire.backends.kernels import large_pages
from quire.core.step import BlockCopy
from quire.errors import InvariantError

ArrayT = TypeVar("ArrayT")


@dataclass(frozen=True, slots=True)
class LayerShape:
    """The shape of one token's keys and values in one layer."""

    num_kv_heads: int
    key_size: int
    value_size: int

    @property
    def num_values(self) -> int:
        """Numbers per token, keys and values."""
        return self.num_kv_heads * (self.key_size + self.value_size)


def num_block_bytes(shapes: Sequence[LayerShape], block_size: int, value_bytes: int, scale_bytes: int = 0) -> int:
    """Return the bytes of one block over all layers; `scale_bytes` is added per head for its key and for its value."""
    values = sum(shape.num_values for shape in shapes) * value_bytes
    scales = sum(2 * shape.num_kv_heads for shape in shapes) * scale_bytes
    return (values + scales) * block_size


class BlockStore(ABC, Generic[ArrayT]):
    """The data of a block pool; the core decides which blocks are in use."""

    keys: list[ArrayT]
    values: list[ArrayT]
    num_block_bytes: int

    @property
    def arrays(self) -> list[Any]:
        """All arrays: keys and values of the first layer, then of the second, and so on."""
        return [array for pair in zip(self.keys, self.values, strict=True) for array in pair]

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        """Copy whole blocks in order; a later copy may read the result of an earlier one."""
        for src, dst in copies:
            for array in self.arrays:
                array[dst] = array[src]

    def read_blocks(self, block_ids: Sequence[int]) -> list[bytes]:
        """Return blocks as bytes, in the order given in the module docstring."""
        return [b"".join(self._to_bytes(array[block]) for array in self.arrays) for block in block_ids]

    def write_blocks(self, block_ids: Sequence[int], data: Sequence[bytes]) -> None:
        """Write bytes of `read_blocks` into these blocks. Raises InvariantError on a wrong size."""
        for block, content in zip(block_ids, data, strict=True):
            if len(content) != self.num_block_bytes:
                raise InvariantError(f"expected a block of {self.num_block_bytes} bytes, got {len(content)}")
            first = 0
            for array in self.arrays:
                num_bytes = array.nbytes // len(array)
                array[block] = self._from_bytes(memoryview(content)[first : first + num_bytes], array)
                first += num_bytes

    @abstractmethod
    def _to_bytes(self, block: ArrayT) -> bytes: ...

    @abstractmethod
    def _from_bytes(self, content: memoryview, array: ArrayT) -> ArrayT:
        """Convert bytes to a block of this array."""


def transposed_blocks(
    shapes: Sequence[LayerShape], num_blocks: int, block_size: int, value_bytes: int, scale_bytes: int = 0
) -> Iterator[tuple[large_pages.Bytes, tuple[int, ...]]]:
    """Yield zeroed memory and its shape for the keys of each layer, then for the values; keys are transposed.
    `scale_bytes` are added to each head; then a number must have one byte."""
    keys = [(num_blocks + 1, s.num_kv_heads, s.key_size + scale_bytes, block_size) for s in shapes]
    values = [(num_blocks + 1, s.num_kv_heads, block_size, s.value_size + scale_bytes) for s in shapes]
    all_shapes = [*keys, *values]
    return zip(large_pages.allocate([math.prod(shape) * value_bytes for shape in all_shapes]), all_shapes, strict=True)
