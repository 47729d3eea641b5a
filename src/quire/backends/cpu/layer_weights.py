"""Packed weights of a decoder in the layout of native/step/forward.hpp, kept alive while their addresses are used."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.backends.cpu.layers import LINEAR, NO_LINEAR
from quire.backends.cpu.linear import Linear, Packer, Reference
from quire.backends.cpu.weight_reader import WeightReader, numbers_in_order
from quire.backends.kernels.arrays import Floats
from quire.checkpoints.families import DecoderShape
from quire.checkpoints.families.decoder_shape import DecoderLayer, MixtureShape
from quire.checkpoints.families.family import RecurrentKind
from quire.checkpoints.families.matrix import Matrix
from quire.checkpoints.families.recurrent import RecurrentShape
from quire.checkpoints.families.recurrent_tensors import PLACES
from quire.checkpoints.families.tensors import (
    EMBEDDING,
    HEAD,
    NORM,
    PER_LAYER_EMBEDDING,
    PER_LAYER_NORM,
    PER_LAYER_PROJECTION,
    ExpertMatrices,
    LayerMatrices,
    expected_shapes,
    matrices_of,
    vectors_of,
)

NO_MIXTURE = (NO_LINEAR, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0.0, 1.0)
NO_RECURRENT = (0,) * 27 + (0.0, 0.0)
RECURRENT_KINDS = {RecurrentKind.DELTA: 1, RecurrentKind.SPACE: 2, RecurrentKind.CONVOLUTION: 3}
"""The numbers of native/layers/recurrent.hpp."""
LINE_FLOATS = 16
"""Floats per cache line; each layer's part of a state slot is aligned to it."""
SHARE_EPS = 1e-6
"""Added to a sum of sigmoids before dividing by it."""


class LayerWeights:
    """Reads weights and keeps every array whose address was passed on."""

    def __init__(self, shape: DecoderShape, reader: WeightReader, packer: Packer, has_balanced_keys: bool) -> None:
        self._shape = shape
        self._has_balanced_keys = has_balanced_keys
        self._factors: dict[int, Floats] = {}
        """Factors of balanced keys, by number of the layer that stores the keys."""
        self._reader = reader
        self._packer = packer
        self._held: list[object] = []
        self.slot_size = 0
        """Floats per state slot; complete after all layers are read."""

    def outer(self) -> dict[str, Any]:
        """Return the weights before and after the layers, as fields of the call."""
        shape, wanted = self._shape, expected_shapes(self._shape)
        embedding = head = self._matrix(EMBEDDING, wanted[EMBEDDING])
        if shape.has_tied_head:
            self._reader.forget(HEAD)
        else:
            head = self._matrix(HEAD, wanted[HEAD])
        found = {"embedding": embedding, "head": head, "norm": self._norm(NORM)}
        if shape.per_layer_size:
            found |= {
                "per_layer_embedding": self._matrix(PER_LAYER_EMBEDDING, wanted[PER_LAYER_EMBEDDING]),
                "per_layer_projection": self._matrix(PER_LAYER_PROJECTION, wanted[PER_LAYER_PROJECTION]),
                "per_layer_norm": self._norm(PER_LAYER_NORM),
                "per_layer_size": shape.per_layer_size,
                "per_layer_scale": shape.per_layer_size**0.5,
                "projection_scale": shape.hidden_size**-0.5,
                "per_layer_sum_scale": 2.0**-0.5,
            }
        return found

    def layer(self, layer: DecoderLayer, rope: int) -> tuple[Any, ...]:
        """Return one layer's fields; `rope` is the index of its RoPE rule in the call."""
        shape, family = self._shape, self._shape.family
        matrices, vectors = matrices_of(shape, layer), vectors_of(shape, layer)
        prefix = f"model.layers.{layer.number}."
        norms = [self._named(vectors, prefix, name) for name in (
            family.norms.input, family.norms.attention, family.norms.mlp, family.norms.after
        )]  # fmt: skip
        qkv = self._products(matrices.qkv)
        query_norm = key_norm = query_span = key_span = 0
        if layer.recurrent is None:
            query_norm, key_norm, query_span, key_span = self._head_norms(layer, vectors, prefix, qkv)
        ones = self._keep(np.ones(layer.head_size, np.float32)) if family.has_value_norm else 0
        sinks = self._plain(f"{prefix}self_attn.sinks") if family.has_sinks else 0
        scale = self._reader.vector(f"{prefix}layer_scalar")[0] if f"{prefix}layer_scalar" in vectors else 1.0
        out = self._products([matrices.out])
        down = self._products(matrices.down)
        return (
            *norms, query_norm, key_norm, ones, sinks,
            _padded(qkv, 4), out[0].reference, _padded(self._products(matrices.gate_up), 2), *_padded(down, 1),
            NO_MIXTURE if layer.mixture is None or matrices.experts is None
            else self._mixture(layer.mixture, matrices.experts, vectors, prefix),
            self._per_layer(matrices, vectors, prefix),
            NO_RECURRENT if layer.recurrent is None else self._recurrent(layer.recurrent, vectors, prefix),
            -1 if layer.window is None else layer.window,
            layer.num_kv_heads, layer.head_size, layer.intermediate_size,
            layer.has_kv, layer.has_values, family.has_output_gate and layer.recurrent is None,
            query_span, key_span, rope, layer.number, float(scale),
        )  # fmt: skip

    def _head_norms(
        self, layer: DecoderLayer, vectors: Mapping[str, tuple[int, ...]], prefix: str, qkv: Sequence[Linear]
    ) -> tuple[int, int, int, int]:
        """Return the addresses of the query and key norm weights, and how many numbers each normalizes together."""
        names = [f"{prefix}self_attn.{name}_norm.weight" for name in "qk"]
        query, key = (self._normed(name) if name in vectors else None for name in names)
        order = matrices_of(self._shape, layer).qkv[0].order
        if order is not None:  # head elements are permuted, and so are their norm weights
            at = numbers_in_order(order, layer.head_size)
            query, key = (None if one is None else _in_order(one, at) for one in (query, key))
        spans = 0 if query is None else len(query), 0 if key is None else len(key)
        if self._has_balanced_keys:
            if layer.has_kv:
                self._factors[layer.number] = self._balance(layer, query, key, qkv)
            of_keys = self._factors[layer.kv_layer]
            of_queries = np.repeat(of_keys, self._shape.num_heads // layer.num_kv_heads, axis=0)
            query = _times(query, of_queries)
            key = _times(key, np.float32(1) / of_keys) if layer.has_kv else None
        return 0 if query is None else self._keep(query), 0 if key is None else self._keep(key), *spans

    def _balance(self, layer: DecoderLayer, query: Floats | None, key: Floats | None, qkv: Sequence[Linear]) -> Floats:
        size = layer.head_size
        num_queries, num_keys = self._shape.num_heads * size, layer.num_kv_heads * size
        if query is not None and key is not None:
            sizes = np.resize(query, num_queries), np.resize(key, num_keys)
        else:
            rows = np.concatenate([one.rows(np.arange(one.num_out)) for one in qkv])[: num_queries + num_keys]
            found = sizes_of_outputs(rows, self._query_bias(layer))
            sizes = found[:num_queries], found[num_queries:]
        return factors_of(sizes[0].reshape(-1, size), sizes[1].reshape(-1, size))

    def _query_bias(self, layer: DecoderLayer) -> Floats | None:
        """Return the joint bias of queries and keys, if any."""
        biases = [self._reader.bias(one) for one in matrices_of(self._shape, layer).qkv[:2]]
        found = [one for one in biases if one is not None]
        return np.concatenate(found) if found else None

    def _mixture(
        self, mixture: MixtureShape, matrices: ExpertMatrices, vectors: Mapping[str, tuple[int, ...]], prefix: str
    ) -> tuple[Any, ...]:
        router = self._products([matrices.router])[0].reference
        gates, ups, down = (self._experts(each) for each in (matrices.gate, matrices.up, matrices.down))
        gate_up = [one for pair in zip(gates, ups, strict=True) for one in pair]
        own = [0, 0, 0, 0, 0]
        if f"{prefix}router.scale" in vectors:
            scale = self._reader.vector(f"{prefix}router.scale") * np.float32(self._shape.hidden_size**-0.5)
            own = [
                self._keep(scale),
                self._named(vectors, prefix, "pre_feedforward_layernorm_2"),
                self._named(vectors, prefix, "post_feedforward_layernorm_1"),
                self._named(vectors, prefix, "post_feedforward_layernorm_2"),
                self._plain(f"{prefix}router.per_expert_scale"),
            ]
        names = mixture.names
        choice_bias, dense_gate = (
            self._optional_vector(f"{prefix}{name}", vectors) for name in (names.choice_bias, names.dense_gate)
        )
        return (
            router, *own, self._keep(np.array(gate_up, LINEAR)), self._keep(np.array(down, LINEAR)),
            mixture.num_experts, mixture.num_used, mixture.intermediate_size, mixture.is_shared_by_all,
            names.is_sigmoid, choice_bias, dense_gate, SHARE_EPS if names.is_sigmoid else 0.0, mixture.scale,
        )  # fmt: skip

    def _per_layer(
        self, matrices: LayerMatrices, vectors: Mapping[str, tuple[int, ...]], prefix: str
    ) -> tuple[Any, ...]:
        if not matrices.per_layer:
            return NO_LINEAR, NO_LINEAR, 0
        gate, project = (self._products([one])[0].reference for one in matrices.per_layer)
        return gate, project, self._named(vectors, prefix, "post_per_layer_input_norm")

    def _recurrent(self, layer: RecurrentShape, vectors: Mapping[str, tuple[int, ...]], prefix: str) -> tuple[Any, ...]:
        """Return the fields of `layers.RECURRENT`, in order."""
        place = prefix + PLACES[layer.kind]
        taps = f"{place}{'conv' if layer.kind is RecurrentKind.CONVOLUTION else 'conv1d'}"
        by_channel = self._reader.vector(f"{taps}.weight")
        addresses = [self._keep(by_channel.reshape(layer.num_channels, layer.num_taps).T)]
        addresses += [self._optional_vector(f"{taps}.bias", vectors), self._log_decay(f"{place}A_log", vectors)]
        addresses += [self._optional_vector(f"{place}{name}", vectors) for name in ("dt_bias", "D", "norm.weight")]
        keys, is_space = layer.num_key_heads * layer.key_size, layer.kind is RecurrentKind.SPACE
        mixed_at, gate_at, rate_at, step_at = _places_in_row(layer)
        in_mixed = (layer.out_size + keys, layer.out_size, 0) if is_space else (0, keys, 2 * keys)
        return (
            RECURRENT_KINDS[layer.kind], *addresses, layer.num_taps, layer.num_channels,
            layer.num_key_heads, layer.num_heads, layer.key_size, layer.value_size, layer.is_tiled,
            mixed_at, gate_at, rate_at, step_at, *in_mixed, layer.in_size, layer.out_size, layer.norm_span, is_space,
            self._place(layer.history_size), self._place(layer.state_size), layer.least_step, layer.most_step,
        )  # fmt: skip

    def _place(self, size: int) -> int:
        first, self.slot_size = self.slot_size, self.slot_size + -(-size // LINE_FLOATS) * LINE_FLOATS
        return first

    def _log_decay(self, name: str, vectors: Mapping[str, tuple[int, ...]]) -> int:
        """Return the address of the negative decay, stored as such in GGUF and as log of its magnitude elsewhere."""
        if name not in vectors:
            return 0
        stored = self._reader.vector(name)
        return self._keep(stored if self._shape.is_gguf else -np.exp(stored))

    def _named(self, vectors: Mapping[str, tuple[int, ...]], prefix: str, name: str | None) -> int:
        """Return the address of this norm's weight, or 0 if the layer has no such norm."""
        full = f"{prefix}{name}.weight"
        return self._norm(full) if name and full in vectors else 0

    def _norm(self, name: str) -> int:
        return self._keep(self._normed(name))

    def _normed(self, name: str) -> Floats:
        offset = 0.0 if self._shape.is_gguf else self._shape.family.norm_offset
        return self._reader.vector(name) + np.float32(offset)

    def _plain(self, name: str) -> int:
        return self._keep(self._reader.vector(name))

    def _optional_vector(self, name: str, vectors: Mapping[str, tuple[int, ...]]) -> int:
        return self._plain(name) if name in vectors else 0

    def _keep(self, array: "Floats | np.ndarray[Any, Any]") -> int:
        array = np.ascontiguousarray(array)
        self._held.append(array)
        address: int = array.ctypes.data
        return address

    def _matrix(self, name: str, shape: tuple[int, ...]) -> Reference:
        made = self._packer.pack([self._reader.source(Matrix(name, shape, shape[0]))])
        self._held.append(made)
        return made.reference

    def _products(self, matrices: Sequence[Matrix]) -> list[Linear]:
        """Pack matrices, joined into one weight where their formats allow it."""
        sources = [self._reader.source(one) for one in matrices]
        biases = [one for one in map(self._reader.bias, matrices) if one is not None]
        bias = np.concatenate(biases) if biases else None
        made, first = [], 0
        for group in self._packer.groups(sources):
            end = first + sum(source.num_out for source in group)
            made.append(self._packer.pack(group, None if bias is None else bias[first:end]))
            first = end
        self._held += made
        return made

    def _experts(self, matrices: Sequence[Matrix]) -> list[Reference]:
        sources = [self._reader.source(one) for one in matrices]
        held, references = self._packer.pack_each(sources, [self._reader.bias(one) for one in matrices])
        self._held += held
        return references


def _places_in_row(layer: RecurrentShape) -> tuple[int, int, int, int]:
    """Return the offsets of mixed inputs, gates, rates and steps in a row of the first product."""
    channels, out = layer.num_channels, layer.out_size
    match layer.kind:
        case RecurrentKind.DELTA:
            return 0, channels, channels + out, channels + out + layer.num_heads
        case RecurrentKind.SPACE:
            return out, 0, 0, out + channels
        case RecurrentKind.CONVOLUTION:
            return 2 * channels, 0, channels, 0


def _padded(weights: Sequence[Linear], count: int) -> list[Reference]:
    return [one.reference for one in weights] + [NO_LINEAR] * (count - len(weights))


def _in_order(norm: Floats, at: "np.ndarray[Any, Any]") -> Floats:
    """Reorder a norm's weight of one or several heads by the same permutation within each head."""
    return norm.reshape(-1, len(at))[:, at].reshape(-1)


def _times(norm: Floats | None, factors: Floats) -> Floats:
    """Multiply a norm's weight by factors per head, which must be equal if one weight serves all heads."""
    flat = factors.reshape(-1)
    if norm is None:
        return flat
    return norm * flat[: len(norm)]


# -- balanced keys -----------------------------------------------------------------------------------------------------
#
# An attention score is a sum over a head's elements of query times key, so a key element may be divided by the factor
# that multiplies the query element. Without this, elements that are large in every key would leave few int8 codes for
# the others. Elements that RoPE rotates together share a factor; then the factor may be applied before or after RoPE.

MOST = 64.0
"""Limit of a factor, relative to the geometric mean of its head."""


def factors_of(query_sizes: Floats, key_sizes: Floats) -> Floats:
    """Return factors [KV head, head size] from typical query and key magnitudes, each [head, head size]."""
    num_kv_heads, head_size = key_sizes.shape
    grouped = query_sizes.reshape(num_kv_heads, -1, head_size)
    queries = _of_pairs(np.sqrt((grouped.astype(np.float64) ** 2).mean(axis=1)))
    keys = _of_pairs(key_sizes.astype(np.float64))
    found = np.sqrt(keys / queries)
    found /= np.exp(np.log(found).mean(axis=1, keepdims=True))
    limited: Floats = np.clip(found, 1 / MOST, MOST).astype(np.float32)
    return limited


def sizes_of_outputs(weight: Floats, bias: Floats | None) -> Floats:
    """Return the typical magnitude of each output for normalized inputs."""
    squares = (weight.astype(np.float64) ** 2).sum(axis=1)
    sizes: Floats = np.sqrt(squares if bias is None else squares + bias.astype(np.float64) ** 2).astype(np.float32)
    return sizes


def _of_pairs(sizes: NDArray[np.float64]) -> NDArray[np.float64]:
    low, high = np.split(sizes, 2, axis=1)
    both = np.sqrt((low**2 + high**2) / 2) + 1e-12
    return np.concatenate([both, both], axis=1)
