"""The KV store: for each layer one array of keys and one of values, divided into blocks.

    keys    [block, slot, kv head, key size]
    values  [block, slot, kv head, value size]

The bytes of a block have these orders. The null block stays zero; block tables are padded with it.

MLX arrays are immutable values: a write creates another array. An array with a single reference donates its buffer to
the array derived from it, so a write copies only the written rows as long as no other reference to the old array
exists; proofs/mlx measures this.
"""

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from quire.backends.host.block_store import BlockStore, LayerShape, num_block_bytes
from quire.config.model_settings import KVDtype
from quire.core.step import BlockCopy

KV_TYPES: dict[KVDtype, mx.Dtype] = {"float32": mx.float32, "bfloat16": mx.bfloat16, "float16": mx.float16}


class KVStore(BlockStore[mx.array]):
    """A block store in MLX arrays."""

    def __init__(self, shapes: Sequence[LayerShape], num_blocks: int, block_size: int, dtype: KVDtype) -> None:
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.dtype = dtype
        self.num_block_bytes = num_block_bytes(shapes, block_size, KV_TYPES[dtype].size)
        leading = (num_blocks + 1, block_size)
        self.keys = [mx.zeros((*leading, shape.num_kv_heads, shape.key_size), KV_TYPES[dtype]) for shape in shapes]
        self.values = [mx.zeros((*leading, shape.num_kv_heads, shape.value_size), KV_TYPES[dtype]) for shape in shapes]
        mx.eval(self.keys, self.values)

    def write(self, layer: int, kv_indices: tuple[mx.array, mx.array], keys: mx.array, values: mx.array) -> mx.array:
        """Write each row's keys and values ([row, kv head, size]) to its block and slot; return which rows are finite.

        Non-finite numbers are written as zeros, because a later user of the block reads all its slots and an attention
        weight of zero does not cancel a NaN. The returned flags make the row itself fail.
        """
        dtype = KV_TYPES[self.dtype]
        keys, values = keys.astype(dtype), values.astype(dtype)
        are_finite = mx.isfinite(keys), mx.isfinite(values)
        self.keys[layer][kv_indices] = mx.where(are_finite[0], keys, 0)
        self.values[layer][kv_indices] = mx.where(are_finite[1], values, 0)
        return are_finite[0].all(axis=(1, 2)) & are_finite[1].all(axis=(1, 2))

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        for src, dst in copies:
            # Gather and evaluate first: a slice shares the pool's buffer, and a pending read of that buffer prevents
            # in-place writes.
            parts = [array[mx.array([src])] for array in self.arrays]
            mx.eval(parts)
            for array, part in zip(self.arrays, parts, strict=True):
                array[mx.array([dst])] = part

    def write_blocks(self, block_ids: Sequence[int], data: Sequence[bytes]) -> None:
        super().write_blocks(block_ids, data)
        mx.eval(self.arrays)

    def _to_bytes(self, block: mx.array) -> bytes:
        # Converted to bytes by MLX, because numpy has no bfloat16.
        return np.array(block.reshape(-1).view(mx.uint8)).tobytes()

    def _from_bytes(self, content: memoryview, array: mx.array) -> mx.array:
        values = mx.array(np.frombuffer(content, np.uint8)).view(array.dtype).reshape(array.shape[1:])
        return mx.where(mx.isfinite(values), values, 0)  # slots that no row reads may contain any value
