"""Where keys and values lie: for each layer one array of keys and one of values, cut into blocks.

A block of keys is stored transposed, so that a kernel reads it in full vector registers:

    keys    [block, kv head, head size, slot]
    values  [block, kv head, slot, head size]

In int8 a number is a code times a scale, and every token and head has a scale for its key and one for its value. They
are made once, when the token is written; each reader of a block, now or from a disk, sees the same numbers:

    keys    [block, kv head]: codes [head size, slot], scales [slot] in float32
    values  [block, kv head]: codes [slot, head size], scales [slot] in float32

As bytes, a block is, layer after layer, its keys and then its values in exactly these orders, in the store's type and
the machine's byte order. Block 0 is the null block, which is never read. bfloat16 is the upper half of a float32, held
as 16-bit integers: numpy has no such type, and only kernels compute with it.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.backends.host.kv_shape import LayerShape, num_block_bytes
from quire.backends.kernels import large_pages
from quire.core.step import BlockCopy
from quire.errors import InvariantError

KV_TYPES = {"float32": 0, "bfloat16": 1, "int8": 2}
HELD_AS: dict[str, type[np.generic]] = {"float32": np.float32, "bfloat16": np.uint16, "int8": np.int8}
SCALE_BYTES = {"float32": 0, "bfloat16": 0, "int8": 4}
"""For each token and head, of its key and of its value."""


def block_bytes(shapes: Sequence[LayerShape], block_size: int, dtype: str) -> int:
    """Bytes of one block over all layers, scales included."""
    return num_block_bytes(shapes, block_size, np.dtype(HELD_AS[dtype]).itemsize, SCALE_BYTES[dtype])


class KVStore:
    """The data of a pool of blocks. Decides nothing: it is told which blocks."""

    def __init__(self, shapes: Sequence[LayerShape], num_blocks: int, block_size: int, dtype: str) -> None:
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.dtype = dtype
        self.num_block_bytes = block_bytes(shapes, block_size, dtype)
        rows = SCALE_BYTES[dtype]  # scales of a block's slots take as many bytes as so many numbers of each slot
        keys = [(num_blocks + 1, s.num_kv_heads, s.key_size + rows, block_size) for s in shapes]
        values = [(num_blocks + 1, s.num_kv_heads, block_size, s.value_size + rows) for s in shapes]
        shaped, held = [*keys, *values], np.dtype(HELD_AS[dtype])
        memory = large_pages.pieces([math.prod(shape) * held.itemsize for shape in shaped])
        arrays: list[NDArray[Any]] = [
            piece.view(held).reshape(shape) for piece, shape in zip(memory, shaped, strict=True)
        ]
        self.keys, self.values = arrays[: len(keys)], arrays[len(keys) :]

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        """Whole blocks, in the order given: a later copy may read what an earlier one wrote."""
        for src, dst in copies:
            for array in (*self.keys, *self.values):
                array[dst] = array[src]

    def read_blocks(self, block_ids: Sequence[int]) -> list[bytes]:
        """Blocks as bytes, in the layout above."""
        return [b"".join(array[block].tobytes() for array in self._in_order()) for block in block_ids]

    def write_blocks(self, block_ids: Sequence[int], data: Sequence[bytes]) -> None:
        """Put such bytes back, perhaps into other blocks."""
        for block, content in zip(block_ids, data, strict=True):
            if len(content) != self.num_block_bytes:
                raise InvariantError(f"expected a block of {self.num_block_bytes} bytes, got {len(content)}")
            first = 0
            for array in self._in_order():
                part = array[block]
                part[...] = np.frombuffer(content, part.dtype, part.size, first).reshape(part.shape)
                first += part.nbytes

    def _in_order(self) -> list[NDArray[Any]]:
        return [array for pair in zip(self.keys, self.values, strict=True) for array in pair]
