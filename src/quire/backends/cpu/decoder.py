"""The decoder of the Llama, Mistral, Qwen2 and Qwen3 families over flat batches, every weight packed once.

The families differ in biases, QK-norm and windows only, and the weights say which are there. Queries, keys and values
are one product where their formats are one, and so are gate and up. A step is one native call.
"""

from collections.abc import Sequence
from copy import copy
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.backends.cpu.kv_store import KV_TYPES, KVStore
from quire.backends.cpu.layers import CALL, CHUNK_ROWS, NO_LINEAR, PARTS, Buffers, Call, check_layout, layer_table
from quire.backends.cpu.linear import Linear, Packer, Reference
from quire.backends.cpu.tiles import StepTiles
from quire.backends.cpu.weight_reader import WeightReader
from quire.backends.host.batch import Batch
from quire.backends.host.decoder_shape import DecoderShape, LayerShape
from quire.backends.host.rope import Rope
from quire.backends.host.sampler import Likeliest
from quire.backends.host.wanted import Computed
from quire.backends.kernels.arrays import Floats, address_of
from quire.backends.kernels.extension import kernels
from quire.backends.kernels.threads import num_threads
from quire.errors import CheckpointError, InvariantError

EMBEDDING, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"


class Decoder:
    """A model of these families. Every row's arithmetic depends on that row alone."""

    def __init__(self, shape: DecoderShape, rope: Rope, reader: WeightReader, packer: Packer) -> None:
        check_layout()
        self.shape = shape
        self._rope = rope
        self._weights = _Weights(reader, packer)
        embedding = head = self._weights.matrix(EMBEDDING, shape.vocabulary_size, shape.hidden_size)
        if shape.has_tied_head:
            reader.forget(HEAD)
        else:
            head = self._weights.matrix(HEAD, shape.vocabulary_size, shape.hidden_size)
        self._layers = layer_table([self._read_layer(reader, at) for at in range(shape.num_layers)])
        self._call = self._constant_call(embedding, head, self._weights.vector([NORM], [shape.hidden_size]))
        self._buffers = Buffers(shape, 0, 0)
        self._store: KVStore | None = None
        """Whom the call was told of."""
        self._seconds: NDArray[np.float64] | None = None
        _refuse_unread(reader)

    @property
    def kv_shapes(self) -> tuple[LayerShape, ...]:
        """What a token takes, layer by layer."""
        return (self.shape.layer,) * self.shape.num_layers

    @property
    def vocabulary_size(self) -> int:
        """Rows of the head."""
        return self.shape.vocabulary_size

    def time_parts(self, seconds: NDArray[np.float64] | None) -> None:
        """From now on add to these how long each of `layers.PARTS` takes; None: do not look at the clock."""
        self._seconds = seconds
        self._call.fields["seconds"] = 0 if seconds is None else address_of(seconds, np.float64, (len(PARTS),))

    def shallow(self) -> "Decoder":
        """The same with its first layer alone: a step takes as much memory and little time."""
        other = copy(self)
        other._call = Call(self._call.fields.copy())
        other._call.fields["num_layers"] = 1
        other._buffers, other._store = Buffers(self.shape, 0, 0), None
        return other

    def compute(
        self,
        batch: Batch,
        store: KVStore,
        wanted: NDArray[np.int64],
        num_sampled: int = 0,
        needed: NDArray[np.int64] | None = None,
    ) -> Computed:
        """Write the rows' KV, and return the last hidden states, the logits of the wanted rows, and the likeliest token
        of the first `num_sampled` of these.

        Rows that are not `needed`, of which there are some unless it is None, have no last hidden states: the last
        layer computes their keys and values alone. All of it lies in buffers that the next step uses again.
        """
        num_rows, num_wanted = len(batch.tokens), len(wanted)
        buffers, call = self._buffers, self._call
        if num_rows > buffers.num_rows or num_wanted > buffers.num_wanted:
            most = max(num_rows, buffers.num_rows), max(num_wanted, buffers.num_wanted)
            buffers = self._buffers = Buffers(self.shape, *most)
            buffers.tell(call.fields)
        tiles = StepTiles(batch.items, store.block_size, self.shape.group_size)
        if tiles.max_block > store.num_blocks or tiles.num_rows != num_rows:
            raise InvariantError(f"block {tiles.max_block} is not in a store of {store.num_blocks}")
        if store is not self._store:
            self._tell_store(store)
        first, stride = batch.rows.ctypes.data, batch.rows.strides[0]
        call.tell_step(
            first, first + stride, first + 2 * stride, first + 3 * stride, *tiles.addresses, wanted.ctypes.data,
            0 if needed is None else needed.ctypes.data, tiles.num_tiles, num_rows, num_wanted,
            num_rows if needed is None else len(needed), num_sampled, num_threads(),
        )  # fmt: skip
        try:
            kernels().compute_step(call.address)
        except IndexError as error:
            raise InvariantError(f"a step names what is not there: {error}") from error
        likeliest = Likeliest(buffers.likeliest[:num_sampled], buffers.is_sound[:num_sampled])
        return Computed(buffers.is_finite[:num_rows], buffers.hidden[:num_rows], buffers.logits[:num_wanted], likeliest)

    def _constant_call(self, embedding: Linear, head: Linear, norm: Floats) -> Call:
        call, shape = np.zeros((), CALL), self.shape
        self._held = embedding, head, norm, np.ascontiguousarray(self._rope.frequencies, np.float32)
        call["embedding"], call["head"] = embedding.reference, head.reference
        call["frequencies"], call["rope_scaling"] = self._held[-1].ctypes.data, self._rope.scaling
        call["layers"], call["num_layers"], call["norm"] = self._layers.ctypes.data, shape.num_layers, norm.ctypes.data
        call["eps"], call["scale"] = shape.norm_eps, shape.head_size**-0.5
        call["num_heads"], call["num_kv_heads"] = shape.num_heads, shape.num_kv_heads
        call["head_size"], call["hidden_size"] = shape.head_size, shape.hidden_size
        call["intermediate_size"], call["chunk_rows"] = shape.intermediate_size, CHUNK_ROWS
        return Call(call)

    def _tell_store(self, store: KVStore) -> None:
        self._store = store
        call, block = self._call.fields, store.keys[0][0].size
        call["stores"], call["kv_type"], call["block_size"] = (
            store.addresses.ctypes.data, KV_TYPES[store.dtype], store.block_size,
        )  # fmt: skip
        call["key_block_stride"] = call["value_block_stride"] = block

    def _read_layer(self, reader: WeightReader, at: int) -> tuple[Any, ...]:
        shape, weights, prefix = self.shape, self._weights, f"model.layers.{at}."
        hidden, wide, attention = shape.hidden_size, shape.intermediate_size, f"{prefix}self_attn."
        norms = [
            weights.address([f"{prefix}input_layernorm.weight"], [hidden]),
            *(
                weights.address([name], [shape.head_size]) if reader.has(name) else 0
                for name in (f"{attention}q_norm.weight", f"{attention}k_norm.weight")
            ),
            weights.address([f"{prefix}post_attention_layernorm.weight"], [hidden]),
        ]
        sizes = [shape.query_size, shape.kv_size, shape.kv_size]
        qkv = weights.products([f"{attention}{name}_proj" for name in "qkv"], sizes, hidden)
        out = weights.products([f"{attention}o_proj"], [hidden], shape.query_size)
        gate_up = weights.products([f"{prefix}mlp.{name}_proj" for name in ("gate", "up")], [wide, wide], hidden)
        down = weights.products([f"{prefix}mlp.down_proj"], [hidden], wide)
        linears = (qkv, *out, gate_up, *down)
        window = shape.windows[at]
        return (*norms, *linears, -1 if window is None else window)


class _Weights:
    """Reads weights and keeps what addresses were taken of."""

    def __init__(self, reader: WeightReader, packer: Packer) -> None:
        self._reader = reader
        self._packer = packer
        self._held: list[object] = []

    def vector(self, names: Sequence[str], sizes: Sequence[int]) -> Floats:
        found = self._reader.vector(names, sizes)
        self._held.append(found)
        return found

    def address(self, names: Sequence[str], sizes: Sequence[int]) -> int:
        return self.vector(names, sizes).ctypes.data

    def matrix(self, name: str, num_out: int, num_in: int) -> Linear:
        return self._packer.pack([self._reader.source(name, num_out, num_in)])

    def products(self, names: Sequence[str], sizes: Sequence[int], num_in: int) -> list[Reference]:
        """A reference for each tensor: to weights that several are together, then to none."""
        biases = [f"{name}.bias" for name in names]
        bias = self.vector(biases, sizes) if self._reader.has(biases[0]) else None
        sources = [self._reader.source(f"{name}.weight", size, num_in) for name, size in zip(names, sizes, strict=True)]
        made, first = [], 0
        for group in self._packer.groups(sources):
            end = first + sum(source.num_out for source in group)
            made.append(self._packer.pack(group, None if bias is None else bias[first:end]))
            first = end
        self._held += made
        return [one.reference for one in made] + [NO_LINEAR] * (len(names) - len(made))


def _refuse_unread(reader: WeightReader) -> None:
    """A tensor nobody used means that the model is not what it seems to be."""
    unread = sorted(name for name in reader.names if not name.endswith("rotary_emb.inv_freq"))
    if unread:
        raise CheckpointError(
            f"the checkpoint has {len(unread)} tensors that its architecture does not use, the first is {unread[0]!r}; "
            "config.json and weights belong to different models"
        )
