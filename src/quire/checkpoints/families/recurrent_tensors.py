"""The tensors of recurrent layers, by Hugging Face name. Some have another shape in GGUF files."""

from collections.abc import Iterator

from quire.checkpoints.families.decoder_shape import DecoderShape
from quire.checkpoints.families.family import RecurrentKind
from quire.checkpoints.families.matrix import Matrix, Shape, plain_matrix
from quire.checkpoints.families.recurrent import RecurrentShape

NAME_PREFIXES = {
    RecurrentKind.DELTA: "linear_attn.",
    RecurrentKind.STATE_SPACE: "mamba.",
    RecurrentKind.CONVOLUTION: "conv.",
}
"""Prefix of tensor names within a layer."""


def inputs_of(shape: DecoderShape, layer: RecurrentShape, prefix: str) -> Iterator[Matrix]:
    """Yield the matrices of a layer's input projection, in the order that `recurrent.py` documents."""
    name_prefix, hidden = prefix + NAME_PREFIXES[layer.kind], shape.hidden_size
    if layer.kind is not RecurrentKind.DELTA:
        yield plain_matrix(f"{name_prefix}in_proj", layer.in_size, hidden, layer.has_bias)
        return
    if shape.family.has_grouped_inputs and not shape.is_gguf:
        value_rows = layer.out_size // layer.num_key_heads  # per key head
        sizes = (layer.key_size, layer.key_size, value_rows, value_rows)
        name, num_out = f"{name_prefix}in_proj_qkvz.weight", layer.num_channels + layer.out_size
        yield from _grouped(name, num_out, hidden, sizes)
    else:
        yield plain_matrix(f"{name_prefix}in_proj_qkv", layer.num_channels, hidden, False)
        yield plain_matrix(f"{name_prefix}in_proj_z", layer.out_size, hidden, False)
    if shape.family.has_grouped_inputs:
        ba_rows = layer.num_heads // layer.num_key_heads
        yield from _grouped(f"{name_prefix}in_proj_ba.weight", 2 * layer.num_heads, hidden, (ba_rows, ba_rows))
    else:
        yield plain_matrix(f"{name_prefix}in_proj_b", layer.num_heads, hidden, False)
        yield plain_matrix(f"{name_prefix}in_proj_a", layer.num_heads, hidden, False)


def output_of(shape: DecoderShape, layer: RecurrentShape, prefix: str) -> Matrix:
    """Return the matrix of a layer's output projection."""
    name = f"{prefix}{NAME_PREFIXES[layer.kind]}out_proj"
    return plain_matrix(name, shape.hidden_size, layer.out_size, layer.has_bias)


def other_tensors_of(shape: DecoderShape, layer: RecurrentShape, prefix: str) -> dict[str, Shape]:
    """Return the shapes of the convolution, A_log, dt_bias, D and norm tensors. Projection biases are not included."""
    name_prefix, is_gguf = prefix + NAME_PREFIXES[layer.kind], shape.is_gguf
    conv = "conv" if layer.kind is RecurrentKind.CONVOLUTION else "conv1d"
    conv_shape = (layer.num_channels, layer.num_taps) if is_gguf else (layer.num_channels, 1, layer.num_taps)
    shapes: dict[str, Shape] = {f"{name_prefix}{conv}.weight": conv_shape}
    if layer.has_tap_bias:
        shapes[f"{name_prefix}{conv}.bias"] = (layer.num_channels,)
    if layer.kind is RecurrentKind.CONVOLUTION:
        return shapes
    is_mamba = layer.kind is RecurrentKind.STATE_SPACE
    per_head: Shape = (layer.num_heads,)
    norm_shape: Shape = (layer.out_size if is_mamba else layer.norm_span,)
    if is_gguf and is_mamba:
        per_head, norm_shape = (layer.num_heads, 1), (layer.out_size // layer.norm_span, layer.norm_span)
    shapes |= {f"{name_prefix}A_log": per_head, f"{name_prefix}dt_bias": (layer.num_heads,)}
    shapes[f"{name_prefix}norm.weight"] = norm_shape
    if is_mamba:
        shapes[f"{name_prefix}D"] = per_head
    return shapes


def _grouped(name: str, num_out: int, num_in: int, sizes: tuple[int, ...]) -> Iterator[Matrix]:
    """Yield the matrices of a tensor with grouped rows; a group has `sizes[i]` rows of matrix i, in this order."""
    group_stride, offset = sum(sizes), 0
    for size in sizes:
        count = num_out // group_stride * size
        yield Matrix(name, (num_out, num_in), count, offset, group_stride=group_stride, rows_per_group=size)
        offset += size
