"""Where keys and values lie: for each layer one tensor of keys and one of values, cut into blocks.

A block of keys is stored transposed, so that a query meets a whole block in one small matrix product:

    keys    [block, kv head, head size, slot]
    values  [block, kv head, slot, head size]

As bytes, a block is, layer after layer, its keys and then its values in exactly these orders, in the store's type and
the machine's byte order. Block 0 is the null block: padding rows write there and it is never read.
"""

import math
from collections.abc import Sequence

import torch

from quire.backends.host.kv_shape import LayerShape, num_block_bytes
from quire.backends.kernels import large_pages
from quire.core.step import BlockCopy
from quire.errors import InvariantError


class KVStore:
    """The data of a pool of blocks. Decides nothing: it is told which blocks."""

    def __init__(
        self, shapes: Sequence[LayerShape], num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.block_size = block_size
        self.num_block_bytes = num_block_bytes(shapes, block_size, dtype.itemsize)
        self.dtype = dtype
        keys = [(num_blocks + 1, s.num_kv_heads, s.key_size, block_size) for s in shapes]
        values = [(num_blocks + 1, s.num_kv_heads, block_size, s.value_size) for s in shapes]
        shaped = [*keys, *values]
        memory = large_pages.pieces([math.prod(shape) * dtype.itemsize for shape in shaped])
        tensors = [
            torch.from_numpy(piece).to(device).view(dtype).view(shape)
            for piece, shape in zip(memory, shaped, strict=True)
        ]
        self.keys, self.values = tensors[: len(keys)], tensors[len(keys) :]

    def write(
        self, layer: int, blocks: torch.Tensor, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        """Put one row's keys and values ([row, kv head, size]) into its block and slot, for every row."""
        self.keys[layer][blocks, :, :, slots] = keys.to(self.dtype)
        self.values[layer][blocks, :, slots] = values.to(self.dtype)

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        """Whole blocks, in the order given: a later copy may read what an earlier one wrote."""
        for src, dst in copies:
            for tensor in (*self.keys, *self.values):
                tensor[dst] = tensor[src]

    def read_blocks(self, block_ids: Sequence[int]) -> list[bytes]:
        """Blocks as bytes, in the layout above."""
        return [b"".join(_to_bytes(tensor[block]) for tensor in self._in_order()) for block in block_ids]

    def write_blocks(self, block_ids: Sequence[int], data: Sequence[bytes]) -> None:
        """Put such bytes back, perhaps into other blocks."""
        for block, content in zip(block_ids, data, strict=True):
            if len(content) != self.num_block_bytes:
                raise InvariantError(f"expected a block of {self.num_block_bytes} bytes, got {len(content)}")
            first = 0
            for tensor in self._in_order():
                num_bytes = tensor[block].numel() * tensor.itemsize
                part = torch.frombuffer(bytearray(content[first : first + num_bytes]), dtype=self.dtype)
                tensor[block] = part.view(tensor[block].shape).to(tensor.device)
                first += num_bytes

    def _in_order(self) -> list[torch.Tensor]:
        return [tensor for pair in zip(self.keys, self.values, strict=True) for tensor in pair]


def _to_bytes(block: torch.Tensor) -> bytes:
    return block.contiguous().cpu().view(torch.uint8).numpy().tobytes()
