"""The KV store: for each layer one array of keys and one of values, divided into blocks.

Keys are stored transposed within a block, so that a kernel reads them in full vector registers:

    keys    [block, kv head, head size, slot]
    values  [block, kv head, slot, head size]

In int8 a number is a code times a scale; every token and head has one scale for its key and one for its value. Codes
and scales are computed once, when the token is written, so all sequences that read a block get the same numbers:

    keys    [block, kv head]: codes [head size, slot], scales [slot] in float32
    values  [block, kv head]: codes [slot, head size], scales [slot] in float32

The bytes of a block have these orders; the null block is never read. bfloat16 is the upper half of a float32, stored as
a 16-bit integer because numpy has no such dtype.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.backends.host.block_store import BlockStore, LayerShape, num_block_bytes, transposed_blocks

KV_TYPES = {"float32": 0, "bfloat16": 1, "int8": 2}
STORED_AS: dict[str, type[np.generic]] = {"float32": np.float32, "bfloat16": np.uint16, "int8": np.int8}
SCALE_BYTES = {"float32": 0, "bfloat16": 0, "int8": 4}
"""Bytes per scale; each token and head has one for its key and one for its value."""


def block_bytes(shapes: Sequence[LayerShape], block_size: int, dtype: str) -> int:
    """Return the bytes of one block over all layers, scales included."""
    return num_block_bytes(shapes, block_size, np.dtype(STORED_AS[dtype]).itemsize, SCALE_BYTES[dtype])


class KVStore(BlockStore[NDArray[Any]]):
    """A block store in large memory pages."""

    def __init__(self, shapes: Sequence[LayerShape], num_blocks: int, block_size: int, dtype: str) -> None:
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.dtype = dtype
        self.num_block_bytes = block_bytes(shapes, block_size, dtype)
        number_type = np.dtype(STORED_AS[dtype])
        memory = transposed_blocks(shapes, num_blocks, block_size, number_type.itemsize, SCALE_BYTES[dtype])
        arrays: list[NDArray[Any]] = [piece.view(number_type).reshape(shape) for piece, shape in memory]
        self.keys, self.values = arrays[: len(shapes)], arrays[len(shapes) :]

    def _to_bytes(self, block: NDArray[Any]) -> bytes:
        return block.tobytes()

    def _from_bytes(self, content: memoryview, array: NDArray[Any]) -> NDArray[Any]:
        return np.frombuffer(content, array.dtype).reshape(array.shape[1:])
