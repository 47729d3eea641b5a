"""The operations of `ops` by the native kernels: no per-row Python, buffers used again layer after layer."""

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

    def begin(self, batch: Batch, store: KVStore) -> StepOps:
        """Places and tiles for all layers."""
        return _NativeStep(self, batch, store)


class _NativeStep:
    def __init__(self, ops: NativeOps, batch: Batch, store: KVStore) -> None:
        shape = ops.shape
        self._shape = shape
        self._by_layer = ops.by_layer
        self._store = store
        self._items = native.NativeItems(batch.items, store.block_size, shape.group_size)
        self._places = native.Places.of(*ops.rope.angles(batch.positions), batch.blocks, batch.slots)
        num_rows = len(batch.tokens)
        # One buffer each for the whole step: a layer is done with it before the next needs it.
        self._normed = torch.empty(num_rows, shape.hidden_size)
        self._queries = torch.empty(num_rows, shape.num_heads, shape.head_size)
        self._answers = torch.empty(num_rows, shape.num_heads, shape.head_size)
        self._gated = torch.empty(num_rows, shape.intermediate_size)

    def norm(self, added: torch.Tensor | None, residual: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return native.add_rms_norm(added, residual, weight, self._normed, self._shape.norm_eps)

    def attend(self, at: int, qkv: torch.Tensor, norms: HeadNorms) -> torch.Tensor:
        keys, values = self._store.keys[at], self._store.values[at]
        heads = None
        if norms.query_norm is not None and norms.key_norm is not None:
            heads = native.HeadNorms(norms.query_norm, norms.key_norm, self._shape.norm_eps)
        native.rope_write(qkv, self._places, heads, keys, values, self._queries)
        shape = self._by_layer[at]
        return native.attention(self._queries, keys, values, self._items, self._answers, shape).flatten(1)

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        return native.silu_mul(gate_up, self._gated)
