"""Packed weights of a decoder as fields of native/step/forward.hpp; their arrays stay in memory while they are used."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.backends.cpu.layers import LINEAR, NO_LINEAR
from quire.backends.cpu.linear import Linear, Packer, Reference
from quire.backends.cpu.weight_reader import WeightReader, element_order
from quire.backends.kernels.arrays import Floats
from quire.checkpoints.families import DecoderShape
from quire.checkpoints.families.decoder_shape import DecoderLayer, MixtureShape
from quire.checkpoints.families.family import RecurrentKind
from quire.checkpoints.families.matrix import Matrix
from quire.checkpoints.families.recurrent import RecurrentShape
from quire.checkpoints.families.recurrent_tensors import NAME_PREFIXES
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
RECURRENT_KINDS = {RecurrentKind.DELTA: 1, RecurrentKind.STATE_SPACE: 2, RecurrentKind.CONVOLUTION: 3}
"""The numbers of these kinds in native/layers/recurrent.hpp."""
LINE_FLOATS = 16
"""Floats per cache line; each layer's part of a state slot is aligned to it."""
SHARE_EPS = 1e-6
"""Added to a sum of sigmoids before dividing by it."""


class LayerWeights:
    """Reads and packs a model's weights; owns every array whose address is in a native structure."""

    def __init__(self, shape: DecoderShape, reader: WeightReader, packer: Packer, has_balanced_keys: bool) -> None:
        self._shape = shape
        self._has_balanced_keys = has_balanced_keys
        self._factors_by_layer: dict[int, Floats] = {}
        """Factors of balanced keys (see the end of this file), by number of the layer that stores the keys."""
        self._reader = reader
        self._packer = packer
        self._live: list[object] = []
        self.slot_size = 0
        """Floats per state slot; complete after all layers are read."""

    def outer(self) -> dict[str, Any]:
        """Return the weights before and after the layers (embedding, head, norm), as fields of the native call."""
        shape, shapes = self._shape, expected_shapes(self._shape)
        embedding = head = self._matrix(EMBEDDING, shapes[EMBEDDING])
        if shape.has_tied_head:
            self._reader.forget(HEAD)
        else:
            head = self._matrix(HEAD, shapes[HEAD])
        fields = {"embedding": embedding, "head": head, "norm": self._norm(NORM)}
        if shape.per_layer_size:
            fields |= {
                "per_layer_embedding": self._matrix(PER_LAYER_EMBEDDING, shapes[PER_LAYER_EMBEDDING]),
                "per_layer_projection": self._matrix(PER_LAYER_PROJECTION, shapes[PER_LAYER_PROJECTION]),
                "per_layer_norm": self._norm(PER_LAYER_NORM),
                "per_layer_size": shape.per_layer_size,
                "per_layer_scale": shape.per_layer_size**0.5,
                "projection_scale": shape.hidden_size**-0.5,
                "per_layer_sum_scale": 2.0**-0.5,
            }
        return fields

    def layer(self, layer: DecoderLayer, rope: int) -> tuple[Any, ...]:
        """Return one layer's fields; `rope` is the index of its RoPE rule in the call."""
        shape, family = self._shape, self._shape.family
        matrices, vectors = matrices_of(shape, layer), vectors_of(shape, layer)
        prefix = f"model.layers.{layer.number}."
        norms = [self._named_norm(vectors, prefix, name) for name in (
            family.norms.input, family.norms.attention, family.norms.mlp, family.norms.after
        )]  # fmt: skip
        qkv = self._products(matrices.qkv)
        query_norm = key_norm = query_span = key_span = 0
        if layer.recurrent is None:
            query_norm, key_norm, query_span, key_span = self._head_norms(layer, vectors, prefix, qkv)
        ones = self._address_of(np.ones(layer.head_size, np.float32)) if family.has_value_norm else 0
        sinks = self._vector(f"{prefix}self_attn.sinks") if family.has_sinks else 0
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
        query, key = (self._norm_weight(name) if name in vectors else None for name in names)
        order = matrices_of(self._shape, layer).qkv[0].order
        if order is not None:  # head elements are permuted, and so are their norm weights
            permutation = element_order(order, layer.head_size)
            query, key = (None if norm is None else _permuted(norm, permutation) for norm in (query, key))
        spans = 0 if query is None else len(query), 0 if key is None else len(key)
        if self._has_balanced_keys:
            if layer.has_kv:
                self._factors_by_layer[layer.number] = self._balance(layer, query, key, qkv)
            key_factors = self._factors_by_layer[layer.kv_layer]
            query_factors = np.repeat(key_factors, self._shape.num_heads // layer.num_kv_heads, axis=0)
            query = _scaled(query, query_factors)
            key = _scaled(key, np.float32(1) / key_factors) if layer.has_kv else None
        return 0 if query is None else self._address_of(query), 0 if key is None else self._address_of(key), *spans

    def _balance(self, layer: DecoderLayer, query: Floats | None, key: Floats | None, qkv: Sequence[Linear]) -> Floats:
        size = layer.head_size
        num_queries, num_keys = self._shape.num_heads * size, layer.num_kv_heads * size
        if query is not None and key is not None:
            magnitudes = np.resize(query, num_queries), np.resize(key, num_keys)
        else:
            rows = np.concatenate([weight.rows(np.arange(weight.num_out)) for weight in qkv])[: num_queries + num_keys]
            joined = output_magnitudes(rows, self._query_bias(layer))
            magnitudes = joined[:num_queries], joined[num_queries:]
        return factors_of(magnitudes[0].reshape(-1, size), magnitudes[1].reshape(-1, size))

    def _query_bias(self, layer: DecoderLayer) -> Floats | None:
        """Return the concatenated bias of queries and keys, if any."""
        biases = [self._reader.bias(matrix) for matrix in matrices_of(self._shape, layer).qkv[:2]]
        present = [bias for bias in biases if bias is not None]
        return np.concatenate(present) if present else None

    def _mixture(
        self, mixture: MixtureShape, matrices: ExpertMatrices, vectors: Mapping[str, tuple[int, ...]], prefix: str
    ) -> tuple[Any, ...]:
        router = self._products([matrices.router])[0].reference
        gates, ups, down = (self._experts(experts) for experts in (matrices.gate, matrices.up, matrices.down))
        gate_up = [reference for pair in zip(gates, ups, strict=True) for reference in pair]
        norms = [0, 0, 0, 0, 0]
        if f"{prefix}router.scale" in vectors:
            scale = self._reader.vector(f"{prefix}router.scale") * np.float32(self._shape.hidden_size**-0.5)
            norms = [
                self._address_of(scale),
                self._named_norm(vectors, prefix, "pre_feedforward_layernorm_2"),
                self._named_norm(vectors, prefix, "post_feedforward_layernorm_1"),
                self._named_norm(vectors, prefix, "post_feedforward_layernorm_2"),
                self._vector(f"{prefix}router.per_expert_scale"),
            ]
        names = mixture.names
        choice_bias, dense_gate = (
            self._optional_vector(f"{prefix}{name}", vectors) for name in (names.choice_bias, names.dense_gate)
        )
        return (
            router, *norms, self._address_of(np.array(gate_up, LINEAR)), self._address_of(np.array(down, LINEAR)),
            mixture.num_experts, mixture.num_used, mixture.intermediate_size, mixture.is_shared_by_all,
            names.is_sigmoid, choice_bias, dense_gate, SHARE_EPS if names.is_sigmoid else 0.0, mixture.scale,
        )  # fmt: skip

    def _per_layer(
        self, matrices: LayerMatrices, vectors: Mapping[str, tuple[int, ...]], prefix: str
    ) -> tuple[Any, ...]:
        if not matrices.per_layer:
            return NO_LINEAR, NO_LINEAR, 0
        gate, project = (self._products([matrix])[0].reference for matrix in matrices.per_layer)
        return gate, project, self._named_norm(vectors, prefix, "post_per_layer_input_norm")

    def _recurrent(self, layer: RecurrentShape, vectors: Mapping[str, tuple[int, ...]], prefix: str) -> tuple[Any, ...]:
        """Return the fields of `layers.RECURRENT`, in order."""
        stem = prefix + NAME_PREFIXES[layer.kind]
        conv = f"{stem}{'conv' if layer.kind is RecurrentKind.CONVOLUTION else 'conv1d'}"
        taps = self._reader.vector(f"{conv}.weight")
        addresses = [self._address_of(taps.reshape(layer.num_channels, layer.num_taps).T)]
        addresses += [self._optional_vector(f"{conv}.bias", vectors), self._log_decay(f"{stem}A_log", vectors)]
        addresses += [self._optional_vector(f"{stem}{name}", vectors) for name in ("dt_bias", "D", "norm.weight")]
        keys_size, is_ssm = layer.num_key_heads * layer.key_size, layer.kind is RecurrentKind.STATE_SPACE
        mixed_at, gate_at, rate_at, step_at = _offsets_in_row(layer)
        qkv_at = (layer.out_size + keys_size, layer.out_size, 0) if is_ssm else (0, keys_size, 2 * keys_size)
        return (
            RECURRENT_KINDS[layer.kind], *addresses, layer.num_taps, layer.num_channels,
            layer.num_key_heads, layer.num_heads, layer.key_size, layer.value_size, layer.is_tiled,
            mixed_at, gate_at, rate_at, step_at, *qkv_at, layer.in_size, layer.out_size, layer.norm_span, is_ssm,
            self._reserve(layer.history_size), self._reserve(layer.state_size), layer.min_step, layer.max_step,
        )  # fmt: skip

    def _reserve(self, size: int) -> int:
        first, self.slot_size = self.slot_size, self.slot_size + -(-size // LINE_FLOATS) * LINE_FLOATS
        return first

    def _log_decay(self, name: str, vectors: Mapping[str, tuple[int, ...]]) -> int:
        """Return the address of the negative decay rates; safetensors store the log of their magnitude instead."""
        if name not in vectors:
            return 0
        stored = self._reader.vector(name)
        return self._address_of(stored if self._shape.is_gguf else -np.exp(stored))

    def _named_norm(self, vectors: Mapping[str, tuple[int, ...]], prefix: str, name: str | None) -> int:
        """Return the address of this norm's weight, or 0 if the layer has no such norm."""
        full = f"{prefix}{name}.weight"
        return self._norm(full) if name and full in vectors else 0

    def _norm(self, name: str) -> int:
        return self._address_of(self._norm_weight(name))

    def _norm_weight(self, name: str) -> Floats:
        offset = 0.0 if self._shape.is_gguf else self._shape.family.norm_offset
        return self._reader.vector(name) + np.float32(offset)

    def _vector(self, name: str) -> int:
        return self._address_of(self._reader.vector(name))

    def _optional_vector(self, name: str, vectors: Mapping[str, tuple[int, ...]]) -> int:
        return self._vector(name) if name in vectors else 0

    def _address_of(self, array: "Floats | np.ndarray[Any, Any]") -> int:
        array = np.ascontiguousarray(array)
        self._live.append(array)
        address: int = array.ctypes.data
        return address

    def _matrix(self, name: str, shape: tuple[int, ...]) -> Reference:
        weight = self._packer.pack([self._reader.source(Matrix(name, shape, shape[0]))])
        self._live.append(weight)
        return weight.reference

    def _products(self, matrices: Sequence[Matrix]) -> list[Linear]:
        """Pack matrices, joined into one weight where their formats allow it."""
        sources = [self._reader.source(matrix) for matrix in matrices]
        biases = [bias for bias in map(self._reader.bias, matrices) if bias is not None]
        bias = np.concatenate(biases) if biases else None
        weights, first = [], 0
        for group in self._packer.groups(sources):
            end = first + sum(source.num_out for source in group)
            weights.append(self._packer.pack(group, None if bias is None else bias[first:end]))
            first = end
        self._live += weights
        return weights

    def _experts(self, matrices: Sequence[Matrix]) -> list[Reference]:
        sources = [self._reader.source(matrix) for matrix in matrices]
        weights, references = self._packer.pack_each(sources, [self._reader.bias(matrix) for matrix in matrices])
        self._live += weights
        return references


def _offsets_in_row(layer: RecurrentShape) -> tuple[int, int, int, int]:
    """Return the offsets of mixed inputs, gates, rates and steps in a row of the layer's input projection."""
    channels, out = layer.num_channels, layer.out_size
    match layer.kind:
        case RecurrentKind.DELTA:
            return 0, channels, channels + out, channels + out + layer.num_heads
        case RecurrentKind.STATE_SPACE:
            return out, 0, 0, out + channels
        case RecurrentKind.CONVOLUTION:
            return 2 * channels, 0, channels, 0


def _padded(weights: Sequence[Linear], count: int) -> list[Reference]:
    return [weight.reference for weight in weights] + [NO_LINEAR] * (count - len(weights))


def _permuted(norm: Floats, permutation: "np.ndarray[Any, Any]") -> Floats:
    """Reorder a norm's weight of one or several heads by the same permutation within each head."""
    return norm.reshape(-1, len(permutation))[:, permutation].reshape(-1)


def _scaled(norm: Floats | None, factors: Floats) -> Floats:
    """Multiply a norm's weight by factors per head, which must be equal if all heads have the same weight."""
    flat = factors.reshape(-1)
    if norm is None:
        return flat
    return norm * flat[: len(norm)]


# -- balanced keys -----------------------------------------------------------------------------------------------------
#
# An attention score is a sum of query times key over a head's elements, so a key element may be divided by a factor
# if the query element is multiplied by it. Otherwise elements that are large in every key would leave few int8 codes
# for the others. Elements that RoPE rotates together share a factor, so it may be applied before or after RoPE.

MAX_FACTOR = 64.0
"""Limit of a factor, relative to the geometric mean of its head."""


def factors_of(query_magnitudes: Floats, key_magnitudes: Floats) -> Floats:
    """Return factors [KV head, head size] from typical query and key magnitudes, each [head, head size]."""
    num_kv_heads, head_size = key_magnitudes.shape
    grouped = query_magnitudes.reshape(num_kv_heads, -1, head_size)
    queries = _pair_magnitudes(np.sqrt((grouped.astype(np.float64) ** 2).mean(axis=1)))
    keys = _pair_magnitudes(key_magnitudes.astype(np.float64))
    factors = np.sqrt(keys / queries)
    factors /= np.exp(np.log(factors).mean(axis=1, keepdims=True))
    limited_factors: Floats = np.clip(factors, 1 / MAX_FACTOR, MAX_FACTOR).astype(np.float32)
    return limited_factors


def output_magnitudes(weight: Floats, bias: Floats | None) -> Floats:
    """Return the typical magnitude of each output for normalized inputs."""
    squares = (weight.astype(np.float64) ** 2).sum(axis=1)
    magnitudes: Floats = np.sqrt(squares if bias is None else squares + bias.astype(np.float64) ** 2).astype(np.float32)
    return magnitudes


def _pair_magnitudes(magnitudes: NDArray[np.float64]) -> NDArray[np.float64]:
    low, high = np.split(magnitudes, 2, axis=1)
    means = np.sqrt((low**2 + high**2) / 2) + 1e-12
    return np.concatenate([means, means], axis=1)
