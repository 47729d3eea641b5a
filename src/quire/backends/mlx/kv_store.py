"""Where keys and values lie: for each layer one array of keys and one of values, cut into blocks.

    keys    [block, slot, kv head, key size]
    values  [block, slot, kv head, value size]

As bytes, a block is, layer after layer, its keys and then its values in exactly these orders, in the store's type and
the machine's byte order. Block 0 is the null block: it stays zeros, and tables are filled up with it.

MLX has values and no places: to write is to make another array. An array of one reference gives its buffer to the
one that is made from it, so what is written here moves no more than the rows it writes, as long as no reference to an
earlier array is kept. The proof measures that.
"""

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from quire.backends.host.kv_shape import LayerShape, num_block_bytes
from quire.config.model_settings import KVDtype
from quire.core.step import BlockCopy
from quire.errors import InvariantError

KV_TYPES: dict[KVDtype, mx.Dtype] = {"float32": mx.float32, "bfloat16": mx.bfloat16, "float16": mx.float16}


class KVStore:
    """The data of a pool of blocks. Decides nothing: it is told which blocks."""

    def __init__(self, shapes: Sequence[LayerShape], num_blocks: int, block_size: int, dtype: KVDtype) -> None:
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.dtype = dtype
        self.num_block_bytes = num_block_bytes(shapes, block_size, KV_TYPES[dtype].size)
        places = (num_blocks + 1, block_size)
        self.keys = [mx.zeros((*places, s.num_kv_heads, s.key_size), KV_TYPES[dtype]) for s in shapes]
        self.values = [mx.zeros((*places, s.num_kv_heads, s.value_size), KV_TYPES[dtype]) for s in shapes]
        mx.eval(self.keys, self.values)

    def write(self, layer: int, places: tuple[mx.array, mx.array], keys: mx.array, values: mx.array) -> mx.array:
        """Put each row's keys and values ([row, kv head, size]) into its block and slot; returns which rows are finite.

        What is not finite is written as zeros: a weight of zero does not silence a NaN, and the next owner of the block
        later reads all its slots. The row itself fails by what is returned.
        """
        dtype = KV_TYPES[self.dtype]
        keys, values = keys.astype(dtype), values.astype(dtype)
        are_sound = mx.isfinite(keys), mx.isfinite(values)
        self.keys[layer][places] = mx.where(are_sound[0], keys, 0)
        self.values[layer][places] = mx.where(are_sound[1], values, 0)
        return are_sound[0].all(axis=(1, 2)) & are_sound[1].all(axis=(1, 2))

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        """Whole blocks, in the order given: a later copy may read what an earlier one wrote."""
        for src, dst in copies:
            # Gathered and computed first: a slice is the pool's own buffer, and a pending read from it keeps
            # it from being written in place.
            parts = [array[mx.array([src])] for array in self.arrays]
            mx.eval(parts)
            for array, part in zip(self.arrays, parts, strict=True):
                array[mx.array([dst])] = part

    def read_blocks(self, block_ids: Sequence[int]) -> list[bytes]:
        """Blocks as bytes, in the layout above."""
        return [b"".join(_to_bytes(array[block]) for array in self.arrays) for block in block_ids]

    def write_blocks(self, block_ids: Sequence[int], data: Sequence[bytes]) -> None:
        """Put such bytes back, perhaps into other blocks."""
        for block, content in zip(block_ids, data, strict=True):
            if len(content) != self.num_block_bytes:
                raise InvariantError(f"expected a block of {self.num_block_bytes} bytes, got {len(content)}")
            first = 0
            for array in self.arrays:
                num_bytes = array.nbytes // array.shape[0]
                part = mx.array(np.frombuffer(content, np.uint8, num_bytes, first))
                values = part.view(array.dtype).reshape(array.shape[1:])
                array[block] = mx.where(mx.isfinite(values), values, 0)  # slots that no row sees may hold anything
                first += num_bytes
        mx.eval(self.arrays)

    @property
    def arrays(self) -> list[mx.array]:
        """Of each layer its keys, then its values."""
        return [array for pair in zip(self.keys, self.values, strict=True) for array in pair]


def _to_bytes(block: mx.array) -> bytes:
    # Made into bytes by MLX: numpy has no bfloat16.
    return np.array(block.reshape(-1).view(mx.uint8)).tobytes()
