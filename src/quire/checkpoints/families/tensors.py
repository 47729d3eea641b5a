"""The tensors a decoder needs, by Hugging Face name with shape, and the rows of them that each product uses.

A config that does not match its weights is rejected here, before any weights are read. Models of other families are not
checked; their loader must compare names and shapes itself.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from quire.checkpoints.families.decoder_shape import DecoderLayer, DecoderShape, MixtureShape, is_decoder, read_shape
from quire.checkpoints.families.matrix import HeadOrder, Matrix, Shape, plain_matrix
from quire.checkpoints.families.recurrent_tensors import inputs_of, output_of, vectors_of_state
from quire.errors import CheckpointError

EMBEDDING, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
PER_LAYER_EMBEDDING = "model.embed_tokens_per_layer.weight"
PER_LAYER_PROJECTION = "model.per_layer_model_projection.weight"
PER_LAYER_NORM = "model.per_layer_projection_norm.weight"


@dataclass(frozen=True, slots=True)
class ExpertMatrices:
    """The matrices of a mixture's products, by expert."""

    router: Matrix
    gate: tuple[Matrix, ...]
    up: tuple[Matrix, ...]
    down: tuple[Matrix, ...]

    def all(self) -> Iterator[Matrix]:
        """Yield the experts' matrices, without the router."""
        yield from (*self.gate, *self.up, *self.down)


@dataclass(frozen=True, slots=True)
class LayerMatrices:
    """The matrices of a layer's products."""

    qkv: tuple[Matrix, ...]
    out: Matrix
    gate_up: tuple[Matrix, ...]
    down: tuple[Matrix, ...]
    experts: "ExpertMatrices | None"
    per_layer: tuple[Matrix, ...]
    """Gate and projection of per-layer embeddings, if any."""

    def all(self) -> Iterator[Matrix]:
        """Yield all matrices of the layer."""
        yield from self.qkv
        yield self.out
        yield from self.gate_up
        yield from self.down
        if self.experts is not None:
            yield from (self.experts.router, *self.experts.all())
        yield from self.per_layer


def matrices_of(shape: DecoderShape, layer: DecoderLayer) -> LayerMatrices:
    """Return the matrices of one layer."""
    prefix, hidden = f"model.layers.{layer.number}.", shape.hidden_size
    mixture = layer.mixture
    return LayerMatrices(
        qkv=tuple(_qkv(shape, layer, prefix) if layer.recurrent is None else inputs_of(shape, layer.recurrent, prefix)),
        out=plain_matrix(f"{prefix}self_attn.o_proj", hidden, shape.num_heads * layer.head_size, shape.has_out_bias)
        if layer.recurrent is None
        else output_of(shape, layer.recurrent, prefix),
        gate_up=tuple(_gate_up(shape, layer, prefix)) if layer.intermediate_size else (),
        down=(
            (plain_matrix(f"{prefix}mlp.down_proj", hidden, layer.intermediate_size, shape.has_mlp_bias),)
            if layer.intermediate_size
            else ()
        ),
        experts=_experts(shape, mixture, prefix) if mixture else None,
        per_layer=(
            plain_matrix(f"{prefix}per_layer_input_gate", shape.per_layer_size, hidden, False),
            plain_matrix(f"{prefix}per_layer_projection", hidden, shape.per_layer_size, False),
        )
        if shape.per_layer_size
        else (),
    )


def vectors_of(shape: DecoderShape, layer: DecoderLayer) -> dict[str, Shape]:
    """Return names and shapes of a layer's norms and other vectors, without biases of products."""
    family, prefix, hidden = shape.family, f"model.layers.{layer.number}.", shape.hidden_size
    names = [family.norms.input, family.norms.attention, family.norms.mlp, family.norms.after]
    found: dict[str, Shape] = {f"{prefix}{name}.weight": (hidden,) for name in names if name}
    queries, keys = shape.num_heads * layer.head_size, layer.num_kv_heads * layer.head_size
    if layer.recurrent is not None:
        found |= vectors_of_state(shape, layer.recurrent, prefix)
    elif family.head_norms != "none":
        is_whole = family.head_norms == "whole"
        found[f"{prefix}self_attn.q_norm.weight"] = (queries if is_whole else layer.head_size,)
        if layer.has_kv:
            found[f"{prefix}self_attn.k_norm.weight"] = (keys if is_whole else layer.head_size,)
    if layer.mixture and layer.mixture.names.dense_gate:
        found[f"{prefix}{layer.mixture.names.dense_gate}"] = (1, hidden)
    if layer.mixture and layer.mixture.has_choice_bias:
        found[f"{prefix}{layer.mixture.names.choice_bias}"] = (layer.mixture.num_experts,)
    if family.has_sinks:
        found[f"{prefix}self_attn.sinks"] = (shape.num_heads,)
    if layer.mixture and layer.mixture.names.is_beside_mlp:
        found |= {
            f"{prefix}{name}.weight": (hidden,)
            for name in ("post_feedforward_layernorm_1", "post_feedforward_layernorm_2", "pre_feedforward_layernorm_2")
        }
        found |= {f"{prefix}router.scale": (hidden,), f"{prefix}router.per_expert_scale": (layer.mixture.num_experts,)}
    if shape.per_layer_size:
        found[f"{prefix}post_per_layer_input_norm.weight"] = (hidden,)
    if family.has_value_norm:
        found[f"{prefix}layer_scalar"] = (1,)
    return found


def expected_shapes(shape: DecoderShape) -> dict[str, Shape]:
    """Return every tensor the decoder needs, without `lm_head.weight` if the head is the embedding."""
    hidden = shape.hidden_size
    found: dict[str, Shape] = {EMBEDDING: (shape.vocabulary_size, hidden), NORM: (hidden,)}
    if not shape.has_tied_head:
        found[HEAD] = (shape.vocabulary_size, hidden)
    if shape.per_layer_size:
        width = shape.num_layers * shape.per_layer_size
        found[PER_LAYER_EMBEDDING] = (shape.per_layer_vocabulary, width)
        found[PER_LAYER_PROJECTION] = (width, hidden)
        found[PER_LAYER_NORM] = (shape.per_layer_size,)
    for layer in shape.layers:
        found |= vectors_of(shape, layer)
        for matrix in matrices_of(shape, layer).all():
            found[matrix.name] = matrix.shape
            if matrix.bias is not None:
                found[matrix.bias] = matrix.bias_shape
    return found


def check_shapes(config: Mapping[str, Any], found: Mapping[str, Shape]) -> None:
    """Compare a known family's tensors with its config; additional tensors are allowed. Raises CheckpointError."""
    if not is_decoder(config):
        return
    num_layers = config.get("num_hidden_layers")
    if isinstance(num_layers, int) and num_layers > len(found):
        counts = f"{num_layers:,} layers (num_hidden_layers of config.json), got {len(found):,} tensors in all"
        raise CheckpointError(f"expected weights for {counts}; download the model again", code="too_few_tensors")
    for name, shape in expected_shapes(read_shape(config)).items():
        if name not in found:
            missing = f"expected a tensor {name!r} in the weights, found none; download the model again"
            raise CheckpointError(missing, code="tensor_missing")
        if found[name] != shape:
            rule = f"expected {name!r} to have shape {list(shape)} by config.json, got {list(found[name])}"
            raise CheckpointError(f"{rule}; download the model again", code="wrong_tensor_shape")


def _qkv(shape: DecoderShape, layer: DecoderLayer, prefix: str) -> Iterator[Matrix]:
    family, hidden, size = shape.family, shape.hidden_size, layer.head_size
    order = None
    if layer.rope.parameters and (family.is_interleaved or layer.rope.num_rotated < size):
        order = HeadOrder(layer.rope.num_rotated, family.is_interleaved)
    sizes = {"q": shape.num_heads * size}
    if layer.has_kv:
        sizes |= {"k": layer.num_kv_heads * size} | ({"v": layer.num_kv_heads * size} if layer.has_values else {})
    first, whole = 0, (sum(sizes.values()), hidden)
    gated = None
    if family.has_output_gate:
        both = plain_matrix(f"{prefix}self_attn.q_proj", 2 * sizes.pop("q"), hidden, shape.has_query_bias)
        half = replace(both, num_out=both.num_out // 2, every=2 * size, each=size, head_size=size)
        gated = replace(half, first=size)
        yield replace(half, order=order)
    for name, num_out in sizes.items():
        own = None if name == "v" else order
        if family.is_fused:
            yield Matrix(f"{prefix}self_attn.qkv_proj.weight", whole, num_out, first, order=own, head_size=size)
        else:
            yield plain_matrix(f"{prefix}self_attn.{name}_proj", num_out, hidden, shape.has_query_bias, own, size)
        first += num_out
    if gated is not None:
        yield gated


def _gate_up(shape: DecoderShape, layer: DecoderLayer, prefix: str) -> Iterator[Matrix]:
    wide, hidden = layer.intermediate_size, shape.hidden_size
    for at, name in enumerate(("gate", "up")):
        is_split = shape.is_gguf and shape.family.is_split_in_gguf
        if shape.family.is_fused or (shape.family.has_fused_gate and not is_split):
            yield Matrix(f"{prefix}mlp.gate_up_proj.weight", (2 * wide, hidden), wide, at * wide)
        else:
            yield plain_matrix(f"{prefix}mlp.{name}_proj", wide, hidden, shape.has_mlp_bias)


def _experts(shape: DecoderShape, mixture: MixtureShape, prefix: str) -> ExpertMatrices:
    names, count = mixture.names, mixture.num_experts
    gate, up, down = (
        tuple(_expert(shape, mixture, prefix, kind, expert) for expert in range(count))
        for kind in ("gate", "up", "down")
    )
    router = plain_matrix(f"{prefix}{names.router}", count, shape.hidden_size, names.is_transposed)
    return ExpertMatrices(router, gate, up, down)


def _expert(shape: DecoderShape, mixture: MixtureShape, prefix: str, kind: str, expert: int) -> Matrix:
    """Return the matrix of one product of one expert: a separate tensor, or a part of one for all experts."""
    names, count, sizes = mixture.names, mixture.num_experts, (mixture.intermediate_size, shape.hidden_size)
    num_out, num_in = reversed(sizes) if kind == "down" else sizes
    if shape.is_gguf and (names.is_transposed or not names.gate_up or shape.family.is_split_in_gguf):
        name, whole = f"{prefix}mlp.experts.{kind}_proj", (count, num_out, num_in)
        bias, bias_shape = (f"{name}.bias", whole[:2]) if names.is_transposed else (None, ())
        return Matrix(f"{name}.weight", whole, num_out, expert * num_out, bias=bias, bias_shape=bias_shape)
    if not names.gate_up:
        return plain_matrix(prefix + getattr(names, kind).format(expert), num_out, num_in, False)
    name, parts, at = (names.down, 1, 0) if kind == "down" else (names.gate_up, 2, int(kind == "up"))
    name, wide = prefix + name, parts * num_out
    if names.is_transposed:  # alternating gate and up
        return Matrix(name, (count, num_in, wide), num_out, expert * wide + at, parts, True, bias=f"{name}_bias",
                      bias_shape=(count, wide))  # fmt: skip
    return Matrix(name, (count, wide, num_in), num_out, expert * wide + at * num_out)
