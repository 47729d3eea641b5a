"""The tensors of recurrent layers, by Hugging Face name; GGUF's sometimes have other shapes."""

from collections.abc import Iterator

from quire.checkpoints.families.decoder_shape import DecoderShape
from quire.checkpoints.families.family import RecurrentKind
from quire.checkpoints.families.matrix import Matrix, Shape, plain_matrix
from quire.checkpoints.families.recurrent import RecurrentShape

PLACES = {
    RecurrentKind.DELTA: "linear_attn.",
    RecurrentKind.SPACE: "mamba.",
    RecurrentKind.CONVOLUTION: "conv.",
}
"""Name prefix within a layer."""


def inputs_of(shape: DecoderShape, layer: RecurrentShape, prefix: str) -> Iterator[Matrix]:
    """Yield the matrices of a layer's first product, in the order given in `recurrent`."""
    place, hidden = prefix + PLACES[layer.kind], shape.hidden_size
    if layer.kind is not RecurrentKind.DELTA:
        yield plain_matrix(f"{place}in_proj", layer.in_size, hidden, layer.has_bias)
        return
    steps = (f"{place}in_proj_ba.weight", 2 * layer.num_heads, layer.num_heads // layer.num_key_heads)
    if shape.family.has_grouped_inputs and not shape.is_gguf:
        values = layer.out_size // layer.num_key_heads
        sizes = (layer.key_size, layer.key_size, values, values)
        name, num_out = f"{place}in_proj_qkvz.weight", layer.num_channels + layer.out_size
        yield from _grouped(name, num_out, hidden, sizes)
    else:
        yield plain_matrix(f"{place}in_proj_qkv", layer.num_channels, hidden, False)
        yield plain_matrix(f"{place}in_proj_z", layer.out_size, hidden, False)
    if shape.family.has_grouped_inputs:
        yield from _grouped(steps[0], steps[1], hidden, (steps[2], steps[2]))
    else:
        yield plain_matrix(f"{place}in_proj_b", layer.num_heads, hidden, False)
        yield plain_matrix(f"{place}in_proj_a", layer.num_heads, hidden, False)


def output_of(shape: DecoderShape, layer: RecurrentShape, prefix: str) -> Matrix:
    """Return the matrix of a layer's output product."""
    return plain_matrix(f"{prefix}{PLACES[layer.kind]}out_proj", shape.hidden_size, layer.out_size, layer.has_bias)


def vectors_of_state(shape: DecoderShape, layer: RecurrentShape, prefix: str) -> dict[str, Shape]:
    """Return the shapes of taps, decays, steps and norms, without biases of products."""
    place, is_gguf = prefix + PLACES[layer.kind], shape.is_gguf
    taps = "conv" if layer.kind is RecurrentKind.CONVOLUTION else "conv1d"
    wide = (layer.num_channels, layer.num_taps) if is_gguf else (layer.num_channels, 1, layer.num_taps)
    found: dict[str, Shape] = {f"{place}{taps}.weight": wide}
    if layer.has_tap_bias:
        found[f"{place}{taps}.bias"] = (layer.num_channels,)
    if layer.kind is RecurrentKind.CONVOLUTION:
        return found
    is_space = layer.kind is RecurrentKind.SPACE
    is_column = is_gguf and is_space
    each: Shape = (layer.num_heads, 1) if is_column else (layer.num_heads,)
    span = layer.norm_span
    found |= {
        f"{place}A_log": each,
        f"{place}dt_bias": (layer.num_heads,),
        f"{place}norm.weight": (layer.out_size // span, span) if is_column else (layer.out_size if is_space else span,),
    }
    if is_space:
        found[f"{place}D"] = each
    return found


def _grouped(name: str, num_out: int, num_in: int, sizes: tuple[int, ...]) -> Iterator[Matrix]:
    """Yield matrices of a tensor whose rows are grouped; each group contains `sizes` rows of each matrix in turn."""
    every, first = sum(sizes), 0
    for size in sizes:
        yield Matrix(name, (num_out, num_in), num_out // every * size, first, every=every, each=size)
        first += size
