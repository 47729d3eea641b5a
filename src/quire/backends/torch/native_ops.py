"""The operations of `ops` by the native kernels: no per-row Python, buffers used again layer after layer."""

from collections.abc import Sequence

import torch

from quire.backends.torch import native
from quire.backends.torch.inputs import Batch
from quire.backends.torch.kv_store import KVStore
from quire.backends.torch.models.rope import Rope
from quire.backends.torch.models.shape import DecoderShape
from quire.backends.torch.ops import HeadNorms, StepOps


def why_not_native(shape: DecoderShape, block_size: int, dtype: torch.dtype, device: torch.device) -> str | None:
    """None if the kernels can run this model here; else the reason."""
    if dtype != torch.float32 or device.type != "cpu":
        return f"native kernels compute in float32 on a CPU, this is {dtype} on {device.type}"
    if shape.head_size not in native.HEAD_SIZES or block_size not in native.BLOCK_SIZES:
        return (
            "native kernels take heads of 32 to 256 in steps of 8 and blocks of 16, 32 or 64, this is "
            f"{shape.head_size} and {block_size}"
        )
    found = native.available()
    return None if found.is_available else f"no native kernels: {found.reason}"


class NativeOps:
    """C++ kernels for one decoder."""

    def __init__(self, shape: DecoderShape, rope: Rope) -> None:
        self.shape = shape
        self.rope = rope
        self.by_layer = [native.AttentionShape(shape.head_size**-0.5, window) for window in shape.windows]

    def begin(self, batch: Batch, store: KVStore, slabs: Sequence[slice]) -> StepOps:
        """Places and tiles for all layers."""
        return _NativeStep(self, batch, store, slabs)


class _NativeStep:
    def __init__(self, ops: NativeOps, batch: Batch, store: KVStore, slabs: Sequence[slice]) -> None:
        shape = ops.shape
        self._shape = shape
        self._by_layer = ops.by_layer
        self._store = store
        self._items = native.NativeItems(batch.items, store.block_size, shape.group_size)
        places = native.Places.of(*ops.rope.angles(batch.positions), batch.blocks, batch.slots)
        self._places = [places.part(rows) for rows in slabs]
        num_rows = len(batch.tokens)
        # One buffer each for the whole step: a layer, or a slab of it, is done with it before the next needs it.
        self._normed = torch.empty(num_rows, shape.hidden_size)
        self._queries = torch.empty(num_rows, shape.num_heads, shape.head_size)
        self._slab_queries = [self._queries[rows] for rows in slabs]
        self._answers = torch.empty(num_rows, shape.num_heads, shape.head_size)
        self._gated = torch.empty(num_rows, shape.intermediate_size)

    def norm(self, added: torch.Tensor | None, residual: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return native.add_rms_norm(added, residual, weight, self._normed[: len(residual)], self._shape.norm_eps)

    def write(self, at: int, slab: int, qkv: torch.Tensor, norms: HeadNorms) -> None:
        keys, values = self._store.keys[at], self._store.values[at]
        heads = None
        if norms.query_norm is not None and norms.key_norm is not None:
            heads = native.HeadNorms(norms.query_norm, norms.key_norm, self._shape.norm_eps)
        native.rope_write(qkv, self._places[slab], heads, keys, values, self._slab_queries[slab])

    def attend(self, at: int) -> torch.Tensor:
        keys, values, shape = self._store.keys[at], self._store.values[at], self._by_layer[at]
        return native.attention(self._queries, keys, values, self._items, self._answers, shape).flatten(1)

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        return native.silu_mul(gate_up, self._gated[: len(gate_up)])
