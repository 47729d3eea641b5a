"""Weights of a decoder in the layout of native/step/forward.hpp: packed, one address each, kept as long as it is."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.backends.cpu.layers import LINEAR, NO_LINEAR
from quire.backends.cpu.linear import Linear, Packer, Reference
from quire.backends.cpu.state_weights import NO_RECURRENT, StateWeights
from quire.backends.cpu.weight_reader import WeightReader, numbers_in_order
from quire.backends.kernels.arrays import Floats
from quire.checkpoints.families import DecoderShape
from quire.checkpoints.families.decoder_shape import DecoderLayer, MixtureShape
from quire.checkpoints.families.matrix import Matrix
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
SHARE_EPS = 1e-6
"""Added to a sum of sigmoids before shares of it are taken."""


@dataclass(frozen=True, slots=True)
class _HeadNorms:
    """Addresses, and how many numbers are normed together: 0, none."""

    query: int
    key: int
    query_span: int
    key_span: int


class LayerWeights:
    """Reads weights and keeps what addresses were taken of."""

    def __init__(self, shape: DecoderShape, reader: WeightReader, packer: Packer, has_balanced_keys: bool) -> None:
        self._shape = shape
        self._has_balanced_keys = has_balanced_keys
        self._factors: dict[int, Floats] = {}
        """Of balanced keys, by the layer that keeps them."""
        self._reader = reader
        self._packer = packer
        self._held: list[object] = []
        self._states = StateWeights(shape, reader, self._keep)

    @property
    def slot_size(self) -> int:
        """Numbers of a slot, once all layers are read."""
        return self._states.slot_size

    def outer(self) -> dict[str, Any]:
        """What stands before and behind the layers, as fields of the call."""
        shape, wanted = self._shape, expected_shapes(self._shape)
        embedding = head = self._matrix(EMBEDDING, wanted[EMBEDDING])
        if shape.has_tied_head:
            self._reader.forget(HEAD)
        else:
            head = self._matrix(HEAD, wanted[HEAD])
        found = {"embedding": embedding, "head": head, "norm": self._norm(NORM, wanted[NORM])}
        if shape.per_layer_size:
            found |= {
                "per_layer_embedding": self._matrix(PER_LAYER_EMBEDDING, wanted[PER_LAYER_EMBEDDING]),
                "per_layer_projection": self._matrix(PER_LAYER_PROJECTION, wanted[PER_LAYER_PROJECTION]),
                "per_layer_norm": self._norm(PER_LAYER_NORM, wanted[PER_LAYER_NORM]),
                "per_layer_size": shape.per_layer_size,
                "per_layer_scale": shape.per_layer_size**0.5,
                "projection_scale": shape.hidden_size**-0.5,
                "per_layer_sum_scale": 2.0**-0.5,
            }
        return found

    def layer(self, layer: DecoderLayer, rope: int) -> tuple[Any, ...]:
        """One layer's fields; `rope`: which of the call's turns it."""
        shape, family = self._shape, self._shape.family
        matrices, vectors = matrices_of(shape, layer), vectors_of(shape, layer)
        prefix = f"model.layers.{layer.number}."
        norms = [self._named(vectors, prefix, name) for name in (
            family.norms.input, family.norms.attention, family.norms.mlp, family.norms.after
        )]  # fmt: skip
        qkv = self._products(matrices.qkv)
        of_heads = _HeadNorms(0, 0, 0, 0)
        if layer.recurrent is None:
            of_heads = self._head_norms(layer, vectors, prefix, qkv)
        ones = self._keep(np.ones(layer.head_size, np.float32)) if family.has_value_norm else 0
        sinks = self._plain(f"{prefix}self_attn.sinks", (shape.num_heads,)) if family.has_sinks else 0
        scale = self._reader.vector(f"{prefix}layer_scalar", (1,))[0] if f"{prefix}layer_scalar" in vectors else 1.0
        out = self._products([matrices.out])
        down = self._products(matrices.down)
        return (
            *norms, of_heads.query, of_heads.key, ones, sinks,
            _padded(qkv, 4), out[0].reference, _padded(self._products(matrices.gate_up), 2), *_padded(down, 1),
            NO_MIXTURE if layer.mixture is None or matrices.experts is None
            else self._mixture(layer.mixture, matrices.experts, vectors, prefix),
            self._per_layer(matrices, vectors, prefix),
            NO_RECURRENT if layer.recurrent is None else self._states.fields(layer.recurrent, vectors, prefix),
            -1 if layer.window is None else layer.window,
            layer.num_kv_heads, layer.head_size, layer.intermediate_size,
            layer.has_kv, layer.has_values, family.has_output_gate and layer.recurrent is None,
            of_heads.query_span, of_heads.key_span, rope, layer.number, float(scale),
        )  # fmt: skip

    def _head_norms(
        self, layer: DecoderLayer, vectors: Mapping[str, tuple[int, ...]], prefix: str, qkv: Sequence[Linear]
    ) -> "_HeadNorms":
        """What queries and keys are normed and multiplied with."""
        names = [f"{prefix}self_attn.{name}_norm.weight" for name in "qk"]
        query, key = (self._normed(name, vectors[name]) if name in vectors else None for name in names)
        order = matrices_of(self._shape, layer).qkv[0].order
        if order is not None:  # a head's numbers stand in another order, and so must what they are multiplied with
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
        return _HeadNorms(0 if query is None else self._keep(query), 0 if key is None else self._keep(key), *spans)

    def _balance(self, layer: DecoderLayer, query: Floats | None, key: Floats | None, qkv: Sequence[Linear]) -> Floats:
        size = layer.head_size
        num_queries, num_keys = self._shape.num_heads * size, layer.num_kv_heads * size
        if query is not None and key is not None:
            sizes = np.resize(query, num_queries), np.resize(key, num_keys)
        else:
            rows = np.concatenate([one.rows(np.arange(one.reference[-1])) for one in qkv])[: num_queries + num_keys]
            found = sizes_of_outputs(rows, self._query_bias(layer), None)
            sizes = found[:num_queries], found[num_queries:]
        return factors_of(sizes[0].reshape(-1, size), sizes[1].reshape(-1, size))

    def _query_bias(self, layer: DecoderLayer) -> Floats | None:
        """Of queries and keys."""
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
            hidden = self._shape.hidden_size
            scale = self._reader.vector(f"{prefix}router.scale", (hidden,)) * np.float32(hidden**-0.5)
            own = [
                self._keep(scale),
                self._named(vectors, prefix, "pre_feedforward_layernorm_2"),
                self._named(vectors, prefix, "post_feedforward_layernorm_1"),
                self._named(vectors, prefix, "post_feedforward_layernorm_2"),
                self._plain(f"{prefix}router.per_expert_scale", (mixture.num_experts,)),
            ]
        names = mixture.names
        choice_bias, dense_gate = (
            self._plain(name, vectors[name]) if (name := prefix + own_name) in vectors else 0
            for own_name in (names.choice_bias, names.dense_gate)
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

    def _named(self, vectors: Mapping[str, tuple[int, ...]], prefix: str, name: str | None) -> int:
        """The norm of this name, 0 if the layer has none."""
        full = f"{prefix}{name}.weight"
        return self._norm(full, vectors[full]) if name and full in vectors else 0

    def _norm(self, name: str, shape: tuple[int, ...]) -> int:
        return self._keep(self._normed(name, shape))

    def _normed(self, name: str, shape: tuple[int, ...]) -> Floats:
        offset = 0.0 if self._shape.is_gguf else self._shape.family.norm_offset
        return self._reader.vector(name, shape) + np.float32(offset)

    def _plain(self, name: str, shape: tuple[int, ...]) -> int:
        return self._keep(self._reader.vector(name, shape))

    def _keep(self, array: "Floats | np.ndarray[Any, Any]") -> int:
        """Its address."""
        array = np.ascontiguousarray(array)
        self._held.append(array)
        address: int = array.ctypes.data
        return address

    def _matrix(self, name: str, shape: tuple[int, ...]) -> Reference:
        made = self._packer.pack([self._reader.source(Matrix(name, shape, shape[0]))])
        self._held.append(made)
        return made.reference

    def _products(self, matrices: Sequence[Matrix]) -> list[Linear]:
        """Weights; several matrices are one where their formats allow it."""
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


def _padded(weights: Sequence[Linear], count: int) -> list[Reference]:
    return [one.reference for one in weights] + [NO_LINEAR] * (count - len(weights))


def _in_order(norm: Floats, at: "np.ndarray[Any, Any]") -> Floats:
    """A norm's weight of one head, or of several, with the numbers of each in this order."""
    return norm.reshape(-1, len(at))[:, at].reshape(-1)


def _times(norm: Floats | None, factors: Floats) -> Floats:
    """A norm's weight with factors of every head; of one head's weight all heads must have the same."""
    flat = factors.reshape(-1)
    if norm is None:
        return flat
    return norm * flat[: len(norm)]


# -- balanced keys -----------------------------------------------------------------------------------------------------
#
# A score is a sum over a head's numbers of query times key, so a key's number may be divided by what the query's is
# multiplied with: what is large in a few numbers of every key would leave the others few codes of 8 bits. Numbers that
# turn together share a factor; then it does not matter whether it comes before or after.

MOST = 64.0
"""A factor, over the middle of its head's."""


def factors_of(query_sizes: Floats, key_sizes: Floats) -> Floats:
    """[KV head, head size]: of [head, head size] and [KV head, head size], how large numbers tend to be."""
    num_kv_heads, head_size = key_sizes.shape
    grouped = query_sizes.reshape(num_kv_heads, -1, head_size)
    queries = _of_pairs(np.sqrt((grouped.astype(np.float64) ** 2).mean(axis=1)))
    keys = _of_pairs(key_sizes.astype(np.float64))
    found = np.sqrt(keys / queries)
    found /= np.exp(np.log(found).mean(axis=1, keepdims=True))
    limited: Floats = np.clip(found, 1 / MOST, MOST).astype(np.float32)
    return limited


def sizes_of_outputs(weight: Floats, bias: Floats | None, norm: Floats | None) -> Floats:
    """How large each output tends to be, for inputs that a norm made."""
    scaled = weight if norm is None else weight * norm
    squares = (scaled.astype(np.float64) ** 2).sum(axis=1)
    sizes: Floats = np.sqrt(squares if bias is None else squares + bias.astype(np.float64) ** 2).astype(np.float32)
    return sizes


def _of_pairs(sizes: NDArray[np.float64]) -> NDArray[np.float64]:
    low, high = np.split(sizes, 2, axis=1)
    both = np.sqrt((low**2 + high**2) / 2) + 1e-12
    return np.concatenate([both, both], axis=1)
