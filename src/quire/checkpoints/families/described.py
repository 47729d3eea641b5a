"""Phrases that describe a decoder's features, beyond its sizes, to the server's operator."""

from collections import Counter
from collections.abc import Iterator

from quire.checkpoints.families.decoder_shape import DecoderShape
from quire.checkpoints.families.family import HeadNorms, RecurrentKind

KIND_NAMES = {
    RecurrentKind.DELTA: "gated delta nets",
    RecurrentKind.STATE_SPACE: "Mamba-2",
    RecurrentKind.CONVOLUTION: "short convolutions",
}


def window_note(shape: DecoderShape) -> str | None:
    """Return a note that the KV cache keeps all tokens of sliding-window layers; None if there are no such layers."""
    windows = Counter(layer.window for layer in shape.layers if layer.window is not None and layer.has_kv)
    if not windows:
        return None
    lengths = " or ".join(f"{window:,}" for window in sorted(windows))
    return (
        f"{windows.total()} of {shape.num_layers} layers have a sliding window of {lengths} tokens; the KV cache keeps "
        "all tokens for them, as for other layers"
    )


def feature_phrases(shape: DecoderShape) -> Iterator[str]:
    """Yield a phrase for each feature that a basic decoder does not have."""
    layers = shape.layers
    if shape.recurrent is not None:
        state_mb = f"{shape.state_bytes / 1e6:.2g}" if shape.state_bytes < 100e6 else f"{shape.state_bytes / 1e6:,.0f}"
        kind = KIND_NAMES[shape.recurrent.kind]
        yield f"{shape.num_recurrent} of {shape.num_layers} layers with {state_mb} MB of state per sequence ({kind})"
    mixtures = Counter(
        (layer.mixture.num_experts, layer.mixture.intermediate_size, layer.mixture.num_used)
        for layer in layers
        if layer.mixture
    )
    for (experts, size, num_used_experts), count in mixtures.items():
        yield f"{count} layers with {experts:,} experts of width {size:,}, {num_used_experts} used per token"
    windows = Counter(layer.window for layer in layers if layer.window is not None)
    for window, count in windows.items():
        yield f"{count} layers with a sliding window of {window:,} tokens"
    attention_layers = [layer for layer in layers if layer.recurrent is None]
    sizes = sorted({layer.head_size for layer in attention_layers})
    if len(sizes) > 1:
        yield f"head sizes {' and '.join(map(str, sizes))}"
    if num_shared := sum(not layer.has_kv for layer in attention_layers):
        yield f"{num_shared} layers share keys and values of an earlier layer"
    if num_without_rope := sum(not layer.rope.num_rotated for layer in attention_layers):
        yield f"{num_without_rope} layers without position encoding"
    for kind in sorted({str(dict(layer.rope.parameters).get("rope_type", "default")) for layer in attention_layers}):
        if kind != "default":
            yield f"{kind} RoPE scaling"
    if shape.family.has_sinks:
        yield "attention sinks"
    if shape.family.head_norms is not HeadNorms.NONE:
        yield "query and key norms"
    if shape.per_layer_size:
        yield f"per-layer embeddings of {shape.per_layer_size:,}"
