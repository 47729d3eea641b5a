"""The KV store as the kernels see it: addresses of alike layers, and where a step's rows stand in them."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from quire.backends.torch.native.tensors import check_dense, check_floats, layout

HEAD_SIZES = range(32, 256 + 1, 8)
BLOCK_SIZES = (16, 32, 64)
KV_TYPES = {torch.float32: 0, torch.bfloat16: 1}


class StoreLayers:
    """Where a store's layers lie. They are alike, and checked once for as long as the store lives."""

    __slots__ = (
        "_tensors",
        "addresses",
        "block_size",
        "key_size",
        "kv_type",
        "num_blocks",
        "num_kv_heads",
        "value_size",
    )

    def __init__(self, keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
        for one, other in zip(keys, values, strict=True):
            _check_store(one, other)
            if one.shape != keys[0].shape or other.shape != values[0].shape or one.dtype != keys[0].dtype:
                raise ValueError(f"the layers of a store are alike, {layout(one)} differs from {layout(keys[0])}")
        self._tensors = (tuple(keys), tuple(values))  # they must outlive their addresses
        self.addresses = [
            (one.data_ptr(), one.stride(0), other.data_ptr(), other.stride(0))
            for one, other in zip(keys, values, strict=True)
        ]
        self.kv_type = KV_TYPES[keys[0].dtype]
        self.num_blocks, self.num_kv_heads, self.key_size, self.block_size = keys[0].shape
        self.value_size = values[0].shape[3]


@dataclass(frozen=True, slots=True)
class Places:
    """Where a step's rows stand: their angles ([row, key size]), blocks and slots ([row]). Made once per step."""

    cos: torch.Tensor
    sin: torch.Tensor
    blocks: torch.Tensor
    slots: torch.Tensor
    max_block: int

    @classmethod
    def of(cls, cos: torch.Tensor, sin: torch.Tensor, blocks: torch.Tensor, slots: torch.Tensor) -> "Places":
        """Angles as models/rope.py makes them; they may keep its middle dimension of one."""
        cos, sin = cos.flatten(1).contiguous(), sin.flatten(1).contiguous()
        check_floats(cos, sin)
        check_dense(blocks, slots)
        if blocks.dtype != torch.int64 or slots.dtype != torch.int64 or not len(cos) == len(blocks) == len(slots):
            raise ValueError("blocks and slots are int64, one per row")
        if min(int(blocks.min()), int(slots.min())) < 0 or int(slots.max()) >= max(BLOCK_SIZES):
            raise ValueError("blocks and slots must lie in the store")
        return cls(cos, sin, blocks, slots, int(blocks.max()))

    def part(self, rows: slice) -> "Places":
        """Those of some neighbouring rows."""
        return Places(self.cos[rows], self.sin[rows], self.blocks[rows], self.slots[rows], self.max_block)


def _check_store(keys: torch.Tensor, values: torch.Tensor) -> None:
    _, num_kv_heads, key_size, block_size = keys.shape
    if keys.dtype not in KV_TYPES or values.dtype != keys.dtype or keys.device.type != "cpu":
        raise TypeError(f"a store holds float32 or bfloat16 on a CPU, this one {keys.dtype} and {values.dtype}")
    if values.shape[:3] != (len(keys), num_kv_heads, block_size) or block_size not in BLOCK_SIZES:
        raise ValueError(f"keys {layout(keys)} and values {layout(values)} must agree; blocks have 16, 32 or 64 slots")
    if key_size not in HEAD_SIZES or values.shape[3] not in HEAD_SIZES:
        raise ValueError(f"heads have a size from 32 to 256 that 8 divides, not {key_size} or {values.shape[3]}")
    if not (keys.is_contiguous() and values.is_contiguous()):
        raise ValueError("the store's keys and values are contiguous")
