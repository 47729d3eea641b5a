"""The operations of `ops` by the native kernels: no per-row Python, buffers used again layer after layer."""

from collections.abc import Sequence
from weakref import WeakKeyDictionary

import torch

from quire.backends.torch import native
from quire.backends.torch.inputs import Batch
from quire.backends.torch.kv_store import KVStore
from quire.backends.torch.models.decoder_config import DecoderShape
from quire.backends.torch.models.rope import Rope
from quire.backends.torch.ops import HeadNorms, StepOps


def why_not_native(shape: DecoderShape, block_size: int, dtype: torch.dtype, device: torch.device) -> str | None:
    """None if the kernels can run this model here; else the reason."""
    if dtype not in native.WEIGHT_TYPES or device.type != "cpu":
        return f"native kernels take weights in float32 or bfloat16 on a CPU, this is {dtype} on {device.type}"
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
        self._layers: WeakKeyDictionary[KVStore, native.StoreLayers] = WeakKeyDictionary()

    def padded(self, num_rows: int) -> int:
        """As many: a row's arithmetic is written out, and no other row is near it."""
        return num_rows

    def begin(self, batch: Batch, store: KVStore, residual: torch.Tensor, row_chunks: Sequence[slice]) -> StepOps:
        """Places and tiles for all layers."""
        return _NativeStep(self, batch, store, residual, row_chunks)

    def layers_of(self, store: KVStore) -> native.StoreLayers:
        """Looked up once per store."""
        if store not in self._layers:
            self._layers[store] = native.StoreLayers(store.keys, store.values)
        return self._layers[store]


class _NativeStep:
    def __init__(
        self, ops: NativeOps, batch: Batch, store: KVStore, residual: torch.Tensor, row_chunks: Sequence[slice]
    ) -> None:
        shape, layers = ops.shape, ops.layers_of(store)
        num_rows, widest = len(residual), row_chunks[0].stop
        # One buffer each for the whole step: a layer, or a slab of it, is done with it before the next needs it.
        # Padding rows go through products as zeros, and through nothing else.
        normed = residual.new_zeros(num_rows, shape.hidden_size)
        gated = residual.new_zeros(widest, shape.intermediate_size)
        queries = residual.new_empty(num_rows, shape.num_heads, shape.head_size)
        answers = residual.new_empty(num_rows, shape.num_heads, shape.head_size)
        items = native.NativeItems(batch.items, store.block_size, shape.group_size)
        places = native.Places.of(*ops.rope.angles(batch.positions), batch.blocks, batch.slots)
        self._eps = shape.norm_eps
        self._by_layer = ops.by_layer
        # Only the last slab has padding.
        cuts = [(rows, items.num_rows - rows.start) for rows in row_chunks]
        self._norms = [native.BoundNorm(residual[rows], normed[rows], shape.norm_eps, real) for rows, real in cuts]
        self._writes = [native.BoundRopeWrite(places.part(rows), layers, queries[rows], real) for rows, real in cuts]
        self._gates = [native.BoundSiluMul(gated[: rows.stop - rows.start], real) for rows, real in cuts]
        self._attention = native.BoundAttention(queries, layers, items, answers)
        self._answers = [answers[rows].flatten(1) for rows in row_chunks]

    def norm(self, chunk: int, added: torch.Tensor | None, weight: torch.Tensor) -> torch.Tensor:
        return self._norms[chunk](added, weight)

    def write(self, at: int, chunk: int, qkv: torch.Tensor, norms: HeadNorms) -> None:
        heads = None
        if norms.query_norm is not None and norms.key_norm is not None:
            heads = native.HeadNormWeights(norms.query_norm, norms.key_norm, self._eps)
        self._writes[chunk](at, qkv, heads)

    def attend(self, at: int) -> Sequence[torch.Tensor]:
        self._attention(at, self._by_layer[at])
        return self._answers

    def silu_mul(self, chunk: int, gate_up: torch.Tensor) -> torch.Tensor:
        return self._gates[chunk](gate_up)
