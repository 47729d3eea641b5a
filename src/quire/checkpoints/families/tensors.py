"""The tensors that a decoder needs, by Hugging Face name with shape, and the rows that each matrix product uses.

A config that does not match its weights is rejected here, before any weights are read. Models of other families are not
checked; their loader must compare names and shapes itself.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from quire.checkpoints.families.decoder_shape import DecoderLayer, DecoderShape, MixtureShape, is_decoder, read_shape
from quire.checkpoints.families.matrix import HeadOrder, Matrix, Shape, plain_matrix
from quire.checkpoints.families.recurrent_tensors import inputs_of, other_tensors_of, output_of
from quire.errors import CheckpointError

EMBEDDING, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
PER_LAYER_EMBEDDING = "model.embed_tokens_per_layer.weight"
PER_LAYER_PROJECTION = "model.per_layer_model_projection.weight"
PER_LAYER_NORM = "model.per_layer_projection_norm.weight"


@dataclass(frozen=True, slots=True)
class ExpertMatrices:
    """The matrices of a mixture of experts: the router, and those of each expert."""

    router: Matrix
    gate: tuple[Matrix, ...]
    up: tuple[Matrix, ...]
    down: tuple[Matrix, ...]

    def all(self) -> Iterator[Matrix]:
        """Yield the experts' matrices, without the router."""
        yield from (*self.gate, *self.up, *self.down)


@dataclass(frozen=True, slots=True)
class LayerMatrices:
    """The matrices of one layer."""

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
    """Return the matrices of one layer, by the tensor names of its family."""
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
    """Return names and shapes of a layer's norms and other small tensors. Projection biases are not included."""
    family, prefix, hidden = shape.family, f"model.layers.{layer.number}.", shape.hidden_size
    names = [family.norms.input, family.norms.attention, family.norms.mlp, family.norms.after]
    shapes: dict[str, Shape] = {f"{prefix}{name}.weight": (hidden,) for name in names if name}
    query_size, key_size = shape.num_heads * layer.head_size, layer.num_kv_heads * layer.head_size
    if layer.recurrent is not None:
        shapes |= other_tensors_of(shape, layer.recurrent, prefix)
    elif family.head_norms != "none":
        is_over_all_heads = family.head_norms == "whole"
        shapes[f"{prefix}self_attn.q_norm.weight"] = (query_size if is_over_all_heads else layer.head_size,)
        if layer.has_kv:
            shapes[f"{prefix}self_attn.k_norm.weight"] = (key_size if is_over_all_heads else layer.head_size,)
    if layer.mixture and layer.mixture.names.dense_gate:
        shapes[f"{prefix}{layer.mixture.names.dense_gate}"] = (1, hidden)
    if layer.mixture and layer.mixture.has_choice_bias:
        shapes[f"{prefix}{layer.mixture.names.choice_bias}"] = (layer.mixture.num_experts,)
    if family.has_sinks:
        shapes[f"{prefix}self_attn.sinks"] = (shape.num_heads,)
    if layer.mixture and layer.mixture.names.is_beside_mlp:
        shapes |= {
            f"{prefix}{name}.weight": (hidden,)
            for name in ("post_feedforward_layernorm_1", "post_feedforward_layernorm_2", "pre_feedforward_layernorm_2")
        }
        shapes |= {f"{prefix}router.scale": (hidden,), f"{prefix}router.per_expert_scale": (layer.mixture.num_experts,)}
    if shape.per_layer_size:
        shapes[f"{prefix}post_per_layer_input_norm.weight"] = (hidden,)
    if family.has_value_norm:
        shapes[f"{prefix}layer_scalar"] = (1,)
    return shapes


def expected_shapes(shape: DecoderShape) -> dict[str, Shape]:
    """Return all tensors that the decoder needs; `lm_head.weight` is left out if the head is the embedding."""
    hidden = shape.hidden_size
    shapes: dict[str, Shape] = {EMBEDDING: (shape.vocabulary_size, hidden), NORM: (hidden,)}
    if not shape.has_tied_head:
        shapes[HEAD] = (shape.vocabulary_size, hidden)
    if shape.per_layer_size:
        width = shape.num_layers * shape.per_layer_size
        shapes[PER_LAYER_EMBEDDING] = (shape.per_layer_vocabulary, width)
        shapes[PER_LAYER_PROJECTION] = (width, hidden)
        shapes[PER_LAYER_NORM] = (shape.per_layer_size,)
    for layer in shape.layers:
        shapes |= vectors_of(shape, layer)
        for matrix in matrices_of(shape, layer).all():
            shapes[matrix.name] = matrix.shape
            if matrix.bias is not None:
                shapes[matrix.bias] = matrix.bias_shape
    return shapes


def check_shapes(config: Mapping[str, Any], stored_shapes: Mapping[str, Shape]) -> None:
    """Compare a known family's tensors with its config; additional tensors are allowed. Raises CheckpointError."""
    if not is_decoder(config):
        return
    num_layers = config.get("num_hidden_layers")
    if isinstance(num_layers, int) and num_layers > len(stored_shapes):
        counts = f"{num_layers:,} layers (num_hidden_layers of config.json), got {len(stored_shapes):,} tensors in all"
        raise CheckpointError(f"expected weights for {counts}; download the model again", code="too_few_tensors")
    for name, shape in expected_shapes(read_shape(config)).items():
        if name not in stored_shapes:
            missing = f"expected a tensor {name!r} in the weights, found none; download the model again"
            raise CheckpointError(missing, code="tensor_missing")
        if stored_shapes[name] != shape:
            message = f"expected {name!r} to have shape {list(shape)} by config.json, got {list(stored_shapes[name])}"
            raise CheckpointError(f"{message}; download the model again", code="wrong_tensor_shape")


def _qkv(shape: DecoderShape, layer: DecoderLayer, prefix: str) -> Iterator[Matrix]:
    family, hidden, size, has_bias = shape.family, shape.hidden_size, layer.head_size, shape.has_query_bias
    order = None
    if layer.rope.parameters and (family.is_interleaved or layer.rope.num_rotated < size):
        order = HeadOrder(layer.rope.num_rotated, family.is_interleaved)
    sizes = {"q": shape.num_heads * size}
    if layer.has_kv:
        sizes |= {"k": layer.num_kv_heads * size} | ({"v": layer.num_kv_heads * size} if layer.has_values else {})
    offset, full_shape, gate = 0, (sum(sizes.values()), hidden), None
    prefix += "self_attn."
    if family.has_output_gate:
        joint = plain_matrix(f"{prefix}q_proj", 2 * sizes.pop("q"), hidden, has_bias)
        query = replace(joint, num_out=joint.num_out // 2, group_stride=2 * size, rows_per_group=size, head_size=size)
        gate = replace(query, first=size)
        yield replace(query, order=order)
    for name, num_out in sizes.items():
        row_order = None if name == "v" else order
        if family.is_fused:
            yield Matrix(f"{prefix}qkv_proj.weight", full_shape, num_out, offset, order=row_order, head_size=size)
        else:
            yield plain_matrix(f"{prefix}{name}_proj", num_out, hidden, has_bias, row_order, size)
        offset += num_out
    if gate is not None:
        yield gate


def _gate_up(shape: DecoderShape, layer: DecoderLayer, prefix: str) -> Iterator[Matrix]:
    width, hidden = layer.intermediate_size, shape.hidden_size
    for index, name in enumerate(("gate", "up")):
        is_split = shape.is_gguf and shape.family.is_split_in_gguf
        if shape.family.is_fused or (shape.family.has_fused_gate and not is_split):
            yield Matrix(f"{prefix}mlp.gate_up_proj.weight", (2 * width, hidden), width, index * width)
        else:
            yield plain_matrix(f"{prefix}mlp.{name}_proj", width, hidden, shape.has_mlp_bias)


def _experts(shape: DecoderShape, mixture: MixtureShape, prefix: str) -> ExpertMatrices:
    names, count = mixture.names, mixture.num_experts
    gate, up, down = (
        tuple(_expert(shape, mixture, prefix, kind, expert) for expert in range(count))
        for kind in ("gate", "up", "down")
    )
    router = plain_matrix(f"{prefix}{names.router}", count, shape.hidden_size, names.is_transposed)
    return ExpertMatrices(router, gate, up, down)


def _expert(shape: DecoderShape, mixture: MixtureShape, prefix: str, kind: str, expert: int) -> Matrix:
    """Return one matrix of one expert: a tensor of its own, or a part of a tensor with all experts."""
    names, count, sizes = mixture.names, mixture.num_experts, (mixture.intermediate_size, shape.hidden_size)
    num_out, num_in = reversed(sizes) if kind == "down" else sizes
    if shape.is_gguf and (names.is_transposed or not names.gate_up or shape.family.is_split_in_gguf):
        name, full_shape = f"{prefix}mlp.experts.{kind}_proj", (count, num_out, num_in)
        bias, bias_shape = (f"{name}.bias", full_shape[:2]) if names.is_transposed else (None, ())
        return Matrix(f"{name}.weight", full_shape, num_out, expert * num_out, bias=bias, bias_shape=bias_shape)
    if not names.gate_up:
        return plain_matrix(prefix + getattr(names, kind).format(expert), num_out, num_in, False)
    name, parts, offset = (names.down, 1, 0) if kind == "down" else (names.gate_up, 2, int(kind == "up"))
    name, rows = prefix + name, parts * num_out
    if names.is_transposed:  # gate and up alternate
        return Matrix(name, (count, num_in, rows), num_out, expert * rows + offset, parts, True, bias=f"{name}_bias",
                      bias_shape=(count, rows))  # fmt: skip
    return Matrix(name, (count, rows, num_in), num_out, expert * rows + offset * num_out)
