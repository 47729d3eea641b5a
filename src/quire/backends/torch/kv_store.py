"""The KV store: for each layer one tensor of keys and one of values, divided into blocks.

Keys are stored transposed within a block, so that a query is multiplied with a whole block in one small matrix product:

    keys    [block, kv head, head size, slot]
    values  [block, kv head, slot, head size]

The bytes of a block have these orders. Padding rows write to the null block, which is never read.
"""

from collections.abc import Sequence

import torch

from quire.backends.host.block_store import BlockStore, LayerShape, num_block_bytes, transposed_blocks


class KVStore(BlockStore[torch.Tensor]):
    """A block store on any torch device."""

    def __init__(
        self, shapes: Sequence[LayerShape], num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.block_size = block_size
        self.num_block_bytes = num_block_bytes(shapes, block_size, dtype.itemsize)
        self.dtype = dtype
        memory = transposed_blocks(shapes, num_blocks, block_size, dtype.itemsize)
        tensors = [torch.from_numpy(piece).to(device).view(dtype).view(shape) for piece, shape in memory]
        self.keys, self.values = tensors[: len(shapes)], tensors[len(shapes) :]

    def write(
        self, layer: int, blocks: torch.Tensor, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        """Write each row's keys and values ([row, kv head, size]) to its block and slot."""
        self.keys[layer][blocks, :, :, slots] = keys.to(self.dtype)
        self.values[layer][blocks, :, slots] = values.to(self.dtype)

    def _to_bytes(self, block: torch.Tensor) -> bytes:
        return block.contiguous().cpu().view(torch.uint8).numpy().tobytes()

    def _from_bytes(self, content: memoryview, array: torch.Tensor) -> torch.Tensor:
        return torch.frombuffer(bytearray(content), dtype=self.dtype).view(array.shape[1:]).to(array.device)
