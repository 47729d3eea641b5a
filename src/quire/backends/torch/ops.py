"""What a layer does beside its products: norms, rotary positions, KV writes, attention, the gate. In plain torch.

`Ops` is the seam: `native_ops` has the same in C++. Either is begun once per step with what all layers share, so that a
layer's calls carry nothing but its own tensors. The residual is added to in place.

A large step goes through a layer in **slabs** of rows, so that what one product makes is still warm when the next reads
it. Only attention wants all rows at once.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.nn.functional as F  # noqa: N812 - as everyone writes it

from quire.backends.torch.attention import AttentionSettings, attend
from quire.backends.torch.inputs import Batch, Tiler, TilesByWindow
from quire.backends.torch.kv_store import KVStore
from quire.backends.torch.linear import padded
from quire.backends.torch.models.decoder_config import DecoderShape
from quire.backends.torch.models.rope import Rope, rotate


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

    def norm(self, chunk: int, added: torch.Tensor | None, weight: torch.Tensor) -> torch.Tensor:
        """The slab's residual += `added`, then its RMS norm."""
        ...

    def write(self, at: int, chunk: int, qkv: torch.Tensor, norms: HeadNorms) -> None:
        """Turn a slab's queries and keys, keep the queries, and put keys and values into the store."""
        ...

    def attend(self, at: int) -> Sequence[torch.Tensor]:
        """Answer the queries of all slabs: [row, all heads] for each slab."""
        ...

    def silu_mul(self, chunk: int, gate_up: torch.Tensor) -> torch.Tensor:
        """silu(gate) * up of a slab's rows that hold both. What it returns lasts until the next slab's."""
        ...


class Ops(Protocol):
    """A way to do them."""

    def padded(self, num_rows: int) -> int:
        """The row count with which a row's bits depend on that row alone."""
        ...

    def begin(self, batch: Batch, store: KVStore, residual: torch.Tensor, row_chunks: Sequence[slice]) -> StepOps:
        """The operations of one step, whose rows ([row, hidden]) are cut like this."""
        ...


class TorchOps:
    """Plain torch: any shape, any type, any device, and still every row as if it were alone."""

    def __init__(self, shape: DecoderShape, rope: Rope, block_size: int, device: torch.device) -> None:
        self.shape = shape
        self.rope = rope
        self.attention = AttentionSettings(scale=shape.head_size**-0.5)
        layers = (shape.layer,) * shape.num_layers
        self._tiler = Tiler(block_size, layers, shape.windows, shape.group_size, device)

    def padded(self, num_rows: int) -> int:
        """Even counts: torch computes the last few numbers of a tensor by another code, with other bits."""
        return padded(num_rows)

    def tiles(self, batch: Batch) -> TilesByWindow:
        """How the rows of a step meet their blocks."""
        return self._tiler.tiles(batch)

    def begin(self, batch: Batch, store: KVStore, residual: torch.Tensor, row_chunks: Sequence[slice]) -> StepOps:
        """Angles and tiles for all layers."""
        return _TorchStep(self, batch, store, residual, row_chunks)


class _TorchStep:
    def __init__(
        self, ops: TorchOps, batch: Batch, store: KVStore, residual: torch.Tensor, row_chunks: Sequence[slice]
    ) -> None:
        self._shape = ops.shape
        self._attention = ops.attention
        self._batch = batch
        self._store = store
        self._row_chunks = row_chunks
        self._residuals = [residual[rows] for rows in row_chunks]
        self._tiles = ops.tiles(batch)
        self._angles = ops.rope.angles(batch.positions)
        self._queries: list[torch.Tensor] = []

    def norm(self, chunk: int, added: torch.Tensor | None, weight: torch.Tensor) -> torch.Tensor:
        residual = self._residuals[chunk]
        if added is not None:
            residual += added
        return _rms_norm(residual, weight, self._shape.norm_eps)

    def write(self, at: int, chunk: int, qkv: torch.Tensor, norms: HeadNorms) -> None:
        shape, rows = self._shape, self._row_chunks[chunk]
        joined = qkv.view(len(qkv), -1, shape.head_size)
        queries, keys, values = torch.split(joined, [shape.num_heads, shape.num_kv_heads, shape.num_kv_heads], dim=1)
        if norms.query_norm is not None and norms.key_norm is not None:
            queries = _rms_norm(queries, norms.query_norm, shape.norm_eps)
            keys = _rms_norm(keys, norms.key_norm, shape.norm_eps)
        cos, sin = (angle[rows].to(qkv.dtype) for angle in self._angles)
        self._store.write(at, self._batch.blocks[rows], self._batch.slots[rows], rotate(keys, cos, sin), values)
        self._queries.append(rotate(queries, cos, sin))

    def attend(self, at: int) -> Sequence[torch.Tensor]:
        queries, self._queries = torch.cat(self._queries), []
        calls = self._tiles[self._shape.windows[at]]
        answers = attend(queries, self._store, at, calls, self._attention).flatten(1)
        return [answers[rows] for rows in self._row_chunks]

    def silu_mul(self, chunk: int, gate_up: torch.Tensor) -> torch.Tensor:
        del chunk
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up


def _rms_norm(rows: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = rows.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(rows.dtype)
