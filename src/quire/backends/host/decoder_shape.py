"""The numbers that make a decoder of the Llama, Mistral, Qwen2 or Qwen3 family, taken from its config; what a token of
any decoder takes in its layers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quire.backends.host.rope import rope_parameters
from quire.checkpoints.families import FAMILIES, sizes_of
from quire.errors import CheckpointError

MAX_HEAD_SIZE = 1024
AGAIN = "download the model again"


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What one token takes in one layer."""

    num_kv_heads: int
    key_size: int
    value_size: int

    @property
    def num_values(self) -> int:
        """Numbers per token: its keys and its values."""
        return self.num_kv_heads * (self.key_size + self.value_size)


def num_block_bytes(shapes: Sequence[LayerShape], block_size: int, value_bytes: int, scale_bytes: int = 0) -> int:
    """Bytes of one block over all layers. `scale_bytes`: beside each head's key, and beside its value."""
    values = sum(shape.num_values for shape in shapes) * value_bytes
    scales = sum(2 * shape.num_kv_heads for shape in shapes) * scale_bytes
    return (values + scales) * block_size


@dataclass(frozen=True, slots=True)
class DecoderShape:
    """Sizes, and where families differ."""

    vocabulary_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    norm_eps: float
    has_tied_head: bool
    windows: tuple[int | None, ...]

    @property
    def query_size(self) -> int:
        """All query heads side by side."""
        return self.num_heads * self.head_size

    @property
    def kv_size(self) -> int:
        """All KV heads side by side."""
        return self.num_kv_heads * self.head_size

    @property
    def group_size(self) -> int:
        """Query heads per KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def layer(self) -> LayerShape:
        """Every layer keeps the same."""
        return LayerShape(self.num_kv_heads, self.head_size, self.head_size)


def is_decoder(config: Mapping[str, Any]) -> bool:
    """Whether it is a decoder of the table, in all that matters."""
    return (
        config.get("model_type") in FAMILIES
        and config.get("hidden_act", "silu") == "silu"
        and rope_parameters(config).get("partial_rotary_factor", 1.0) == 1.0
    )


def read_shape(config: Mapping[str, Any]) -> DecoderShape:
    """The shape, every size checked: a config is a stranger's file."""
    sizes = sizes_of(config)
    if sizes.head_dim % 2 or sizes.head_dim > MAX_HEAD_SIZE:
        raise CheckpointError(
            f"heads must have an even size up to {MAX_HEAD_SIZE}, config.json says {sizes.head_dim}; take another model"
        )
    eps = config.get("rms_norm_eps", 1e-6)
    if not isinstance(eps, float | int) or not 0 <= eps < 1:
        raise CheckpointError(f"rms_norm_eps of config.json must be a number from 0 to 1, {eps!r} given; {AGAIN}")
    return DecoderShape(
        vocabulary_size=sizes.vocabulary,
        hidden_size=sizes.hidden,
        intermediate_size=sizes.intermediate,
        num_layers=sizes.num_layers,
        num_heads=sizes.num_heads,
        num_kv_heads=sizes.num_kv_heads,
        head_size=sizes.head_dim,
        norm_eps=float(eps),
        has_tied_head=sizes.tied,
        windows=windows_of(config, sizes.num_layers),
    )


def model_tokens(config: Mapping[str, Any]) -> int:
    """The longest sequence a model was made for, as far as its config says."""
    for fields in (config, config.get("text_config")):
        tokens = (
            fields.get("max_position_embeddings", fields.get("n_positions")) if isinstance(fields, Mapping) else None
        )
        if isinstance(tokens, int) and tokens >= 1:
            return tokens
    return 2048


def windows_of(config: Mapping[str, Any], num_layers: int) -> tuple[int | None, ...]:
    """The sliding window of each layer, or None where it sees everything."""
    window = config.get("sliding_window")
    if window is not None and (not isinstance(window, int) or window < 1):
        raise CheckpointError(
            f"sliding_window of config.json must be a number of tokens or null, {window!r} given; {AGAIN}"
        )
    kinds = config.get("layer_types")
    if kinds is None:
        kinds = _layer_kinds(config, num_layers) if window is not None else ["full_attention"] * num_layers
    if not isinstance(kinds, list) or len(kinds) != num_layers or not all(isinstance(kind, str) for kind in kinds):
        raise CheckpointError(f"layer_types of config.json must name a kind for each of {num_layers} layers; {AGAIN}")
    strange = sorted(set(kinds) - {"full_attention", "sliding_attention"})
    if strange:
        raise CheckpointError(
            f"layers must be of full or sliding attention, config.json also has {', '.join(strange)}: recurrent and "
            "chunked layers cannot share a prefix cache; take another model"
        )
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _layer_kinds(config: Mapping[str, Any], num_layers: int) -> list[str]:
    """Where an older config has a window but does not say which layers use it."""
    if "use_sliding_window" not in config and config.get("model_type") not in ("qwen2", "qwen3"):
        return ["sliding_attention"] * num_layers
    first = config.get("max_window_layers", num_layers) if config.get("use_sliding_window") else num_layers
    return ["full_attention" if at < first else "sliding_attention" for at in range(num_layers)]
