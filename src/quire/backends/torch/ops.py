"""What a layer does beside its products: norms, rotary positions, KV writes, attention, the gate. In plain torch.

`Ops` is the seam: `native_ops` has the same in C++. Either is begun once per step with what all layers share, so that a
layer's calls carry nothing but its own tensors. A residual is added to in place.
"""

from typing import Protocol

import torch
import torch.nn.functional as F  # noqa: N812 - as everyone writes it

from quire.backends.torch.attention import AttentionSettings, attend
from quire.backends.torch.inputs import Batch, Tiler, TilesByWindow
from quire.backends.torch.kv_store import KVStore
from quire.backends.torch.models.rope import Rope, rotate
from quire.backends.torch.models.shape import DecoderShape


class HeadNorms(Protocol):
    """Where a layer keeps the norms of its heads, if it has any."""

    @property
    def query_norm(self) -> torch.Tensor | None:
        """[head size], or none."""
        ...

    @property
    def key_norm(self) -> torch.Tensor | None:
        """[head size], or none."""
        ...


class StepOps(Protocol):
    """One step's operations."""

    def norm(self, added: torch.Tensor | None, residual: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """`residual` += `added`, then its RMS norm."""
        ...

    def attend(self, at: int, qkv: torch.Tensor, norms: HeadNorms) -> torch.Tensor:
        """Turn queries and keys, put keys and values into the store, and answer the queries: [row, all heads]."""
        ...

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """silu(gate) * up of rows that hold both."""
        ...


class Ops(Protocol):
    """A way to do them."""

    def begin(self, batch: Batch, store: KVStore) -> StepOps:
        """The operations of one step."""
        ...


class TorchOps:
    """Plain torch: any shape, any type, any device, and still every row as if it were alone."""

    def __init__(self, shape: DecoderShape, rope: Rope, block_size: int, device: torch.device) -> None:
        self.shape = shape
        self.rope = rope
        self.attention = AttentionSettings(scale=shape.head_size**-0.5)
        layers = (shape.layer,) * shape.num_layers
        self._tiler = Tiler(block_size, layers, shape.windows, shape.group_size, device)

    def begin(self, batch: Batch, store: KVStore) -> StepOps:
        """Angles and tiles for all layers."""
        return _TorchStep(self, batch, store, self._tiler.tiles(batch))


class _TorchStep:
    def __init__(self, ops: TorchOps, batch: Batch, store: KVStore, tiles: TilesByWindow) -> None:
        self._shape = ops.shape
        self._attention = ops.attention
        self._batch = batch
        self._store = store
        self._tiles = tiles
        self._angles = ops.rope.angles(batch.positions)

    def norm(self, added: torch.Tensor | None, residual: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if added is not None:
            residual += added
        return _rms_norm(residual, weight, self._shape.norm_eps)

    def attend(self, at: int, qkv: torch.Tensor, norms: HeadNorms) -> torch.Tensor:
        shape = self._shape
        joined = qkv.view(len(qkv), -1, shape.head_size)
        queries, keys, values = torch.split(joined, [shape.num_heads, shape.num_kv_heads, shape.num_kv_heads], dim=1)
        if norms.query_norm is not None and norms.key_norm is not None:
            queries = _rms_norm(queries, norms.query_norm, shape.norm_eps)
            keys = _rms_norm(keys, norms.key_norm, shape.norm_eps)
        cos, sin = (angle.to(qkv.dtype) for angle in self._angles)
        self._store.write(at, self._batch.blocks, self._batch.slots, rotate(keys, cos, sin), values)
        calls = self._tiles[shape.windows[at]]
        return attend(rotate(queries, cos, sin), self._store, at, calls, self._attention).flatten(1)

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up


def _rms_norm(rows: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = rows.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(rows.dtype)
