"""Text about features of a decoder beyond its sizes, for operators."""

from collections import Counter
from collections.abc import Iterator

from quire.checkpoints.families.decoder_shape import DecoderShape
from quire.checkpoints.families.family import HeadNorms, RecurrentKind

KINDS = {
    RecurrentKind.DELTA: "gated delta nets",
    RecurrentKind.SPACE: "Mamba-2",
    RecurrentKind.CONVOLUTION: "short convolutions",
}


def kept_whole(shape: DecoderShape) -> str | None:
    """Return a note on sliding-window layers whose KV is kept for all tokens; None without such layers."""
    windows = Counter(layer.window for layer in shape.layers if layer.window is not None and layer.has_kv)
    if not windows:
        return None
    lengths = " or ".join(f"{window:,}" for window in sorted(windows))
    return (
        f"{windows.total()} of {shape.num_layers} layers have a sliding window of {lengths} tokens; the KV cache keeps "
        "all tokens for them, as for other layers"
    )


def parts_of(shape: DecoderShape) -> Iterator[str]:
    """Yield a phrase for each feature that a basic decoder does not have."""
    layers = shape.layers
    if shape.recurrent is not None:
        stored = f"{shape.state_bytes / 1e6:.2g}" if shape.state_bytes < 100e6 else f"{shape.state_bytes / 1e6:,.0f}"
        kind = KINDS[shape.recurrent.kind]
        yield f"{shape.num_recurrent} of {shape.num_layers} layers keep a recurrent state of {stored} MB ({kind})"
    mixtures = Counter(
        (layer.mixture.num_experts, layer.mixture.intermediate_size, layer.mixture.num_used)
        for layer in layers
        if layer.mixture
    )
    for (experts, size, used), count in mixtures.items():
        yield f"{count} layers with {experts:,} experts of {size:,}, {used} used per token"
    windows = Counter(layer.window for layer in layers if layer.window is not None)
    for window, count in windows.items():
        yield f"{count} layers with a sliding window of {window:,} tokens"
    attending = [layer for layer in layers if layer.recurrent is None]
    sizes = sorted({layer.head_size for layer in attending})
    if len(sizes) > 1:
        yield f"head sizes {' and '.join(map(str, sizes))}"
    if shared := sum(not layer.has_kv for layer in attending):
        yield f"{shared} layers share keys and values of an earlier layer"
    if plain := sum(not layer.rope.num_rotated for layer in attending):
        yield f"{plain} layers without position encoding"
    for kind in sorted({str(dict(layer.rope.parameters).get("rope_type", "default")) for layer in attending}):
        if kind != "default":
            yield f"{kind} RoPE scaling"
    if shape.family.has_sinks:
        yield "attention sinks"
    if shape.family.head_norms is not HeadNorms.NONE:
        yield "query and key norms"
    if shape.per_layer_size:
        yield f"per-layer embeddings of {shape.per_layer_size:,}"
