"""Recurrent layers, which keep a state instead of keys and values: which layers are recurrent, and their sizes.

The input projection of a layer computes several vectors per row and concatenates them. A short convolution mixes some
of them with those of earlier tokens. The order, by kind, is defined in native/layers/recurrent.hpp:

    delta         queries keys values │ gates │ rates │ steps     the first three are mixed
    space         gates │ values keys queries │ steps             values, keys and queries are mixed
    convolution   input gates │ output gates │ values             values are mixed
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import Any

from quire.checkpoints.families.config_fields import config_error, flag_of, size_of
from quire.checkpoints.families.family import Family, RecurrentKind

RECURRENT_TYPES = ("linear_attention", "conv", "mamba")
"""Names of recurrent layers in layer_types; each family uses one of them."""
COLUMNS = 32
"""Number of state columns that are stored together; see native/layers/recurrent.hpp."""
MAX_TAPS, MAX_KEY_SIZE = 8, 512


@dataclass(frozen=True, slots=True)
class RecurrentShape:
    """The shape of a recurrent layer, the same for all recurrent layers of a model."""

    kind: RecurrentKind
    num_taps: int  # number of tokens that the convolution covers
    num_channels: int
    """Elements of a row that the convolution mixes with those of earlier tokens."""
    out_size: int
    num_key_heads: int = 0
    num_heads: int = 0
    key_size: int = 0
    value_size: int = 0
    has_bias: bool = False
    """Whether the input and output projections have a bias."""
    has_tap_bias: bool = False
    norm_span: int = 0
    """Elements normalized together: a value head, or all heads that share a key."""
    is_tiled: bool = False
    """Value heads h, h + key heads, ... share key head h; otherwise adjacent value heads do."""
    min_step: float = 0.0  # bounds of Mamba-2's time step
    max_step: float = inf

    @property
    def in_size(self) -> int:
        """Elements per row of the input projection's output."""
        match self.kind:
            case RecurrentKind.DELTA:
                return self.num_channels + self.out_size + 2 * self.num_heads
            case RecurrentKind.STATE_SPACE:
                return self.num_channels + self.out_size + self.num_heads
            case RecurrentKind.CONVOLUTION:
                return 3 * self.num_channels

    @property
    def history_size(self) -> int:
        """Elements of earlier tokens, for the convolution, in a state slot."""
        return (self.num_taps - 1) * self.num_channels

    @property
    def state_size(self) -> int:
        """Elements of the recurrent state itself, including the padding of its last columns."""
        return self.num_heads * -(-self.value_size // COLUMNS) * COLUMNS * self.key_size


def recurrent_layers(family: Family, config: Mapping[str, Any], num_layers: int) -> tuple[bool, ...]:
    """Return for each layer whether it is recurrent."""
    if family.recurrent is None:
        return (False,) * num_layers
    kinds = config.get("layer_types")
    if isinstance(kinds, list) and len(kinds) == num_layers:
        return tuple(kind in RECURRENT_TYPES for kind in kinds)
    if isinstance(attention_layers := config.get("full_attn_idxs"), list):
        return tuple(layer not in attention_layers for layer in range(num_layers))
    interval = size_of(config, "full_attention_interval", 1)
    return tuple((layer + 1) % interval != 0 for layer in range(num_layers))


def recurrent_shape(family: Family, config: Mapping[str, Any], *, is_tiled: bool) -> RecurrentShape:
    """Return the shape of the recurrent layers. Raises CheckpointError for sizes that kernels do not support."""
    match family.recurrent:
        case RecurrentKind.DELTA:
            shape = _delta(config, is_tiled=is_tiled)
        case RecurrentKind.STATE_SPACE:
            shape = _space(config)
        case _:
            hidden, taps = size_of(config, "hidden_size"), size_of(config, "conv_L_cache", 3)
            bias = flag_of(config, "conv_bias")
            shape = RecurrentShape(RecurrentKind.CONVOLUTION, taps, hidden, hidden, has_bias=bias, has_tap_bias=bias)
    if not 2 <= shape.num_taps <= MAX_TAPS:
        expected = f"convolutions over 2 to {MAX_TAPS} tokens, got {shape.num_taps}"
        raise config_error("unsupported_convolution", expected, "choose another model")
    if shape.kind is RecurrentKind.CONVOLUTION:
        return shape
    if shape.num_heads % shape.num_key_heads:
        expected = f"value heads to be a multiple of key heads, got {shape.num_heads} and {shape.num_key_heads}"
        raise config_error("value_heads_not_divisible", expected)
    if shape.key_size % 2 or shape.key_size > MAX_KEY_SIZE:
        expected = f"an even number of state rows per head, up to {MAX_KEY_SIZE}, got {shape.key_size}"
        raise config_error("unsupported_state_rows", expected, "choose another model")
    return shape


def _delta(config: Mapping[str, Any], *, is_tiled: bool) -> RecurrentShape:
    key_heads, heads = size_of(config, "linear_num_key_heads"), size_of(config, "linear_num_value_heads")
    key_size, value_size = size_of(config, "linear_key_head_dim"), size_of(config, "linear_value_head_dim")
    return RecurrentShape(
        RecurrentKind.DELTA,
        num_taps=size_of(config, "linear_conv_kernel_dim"),
        num_channels=2 * key_heads * key_size + heads * value_size,
        out_size=heads * value_size,
        num_key_heads=key_heads,
        num_heads=heads,
        key_size=key_size,
        value_size=value_size,
        norm_span=value_size,
        is_tiled=is_tiled,
    )


def _space(config: Mapping[str, Any]) -> RecurrentShape:
    heads, groups = size_of(config, "mamba_n_heads"), size_of(config, "mamba_n_groups")
    inner = size_of(config, "mamba_expand") * size_of(config, "hidden_size")
    value_size = config.get("mamba_d_head", "auto")
    value_size = inner // heads if value_size == "auto" else size_of(config, "mamba_d_head")
    if value_size * heads != inner:
        expected = "mamba_n_heads x mamba_d_head to equal mamba_expand x hidden_size"
        raise config_error("mamba_sizes_differ", f"{expected}, got {heads} x {value_size} and {inner}")
    key_size, defaults = size_of(config, "mamba_d_state"), (0.0, inf)
    min_step, max_step = defaults
    limits = config.get("time_step_limit")
    if isinstance(limits, list) and len(limits) == 2:
        pairs = zip(limits, defaults, strict=True)
        min_step, max_step = (float(limit) if type(limit) in (int, float) else default for limit, default in pairs)
    return RecurrentShape(
        RecurrentKind.STATE_SPACE,
        num_taps=size_of(config, "mamba_d_conv"),
        num_channels=inner + 2 * groups * key_size,
        out_size=inner,
        num_key_heads=groups,
        num_heads=heads,
        key_size=key_size,
        value_size=value_size,
        has_bias=flag_of(config, "mamba_proj_bias"),
        has_tap_bias=flag_of(config, "mamba_conv_bias"),
        norm_span=inner // groups,
        min_step=min_step,
        max_step=max_step,
    )
