"""Per-layer rules of a config: the sliding window and RoPE of each layer."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quire.checkpoints.families.config_fields import config_error, number_of, object_of, size_of
from quire.checkpoints.families.family import Family, SlidingRope
from quire.checkpoints.families.family_table import FAMILIES
from quire.checkpoints.families.recurrent import RECURRENT_TYPES

FULL, SLIDING = "full_attention", "sliding_attention"
ATTENTION = "attention"
"""Name of full attention in configs with recurrent layers."""
MIXED_WINDOWS = frozenset({"qwen2", "qwen3", "qwen3_moe", "smollm3"})
"""Families whose sliding window applies only if use_sliding_window is true."""


@dataclass(frozen=True, slots=True)
class RopeRule:
    """RoPE of a layer's heads, with the fields of the config's `rope_parameters`. Empty parameters: no RoPE."""

    head_size: int
    num_rotated: int
    """Number of elements at the start of a head that are rotated; the others are not."""
    parameters: tuple[tuple[str, Any], ...]


def windows_of(config: Mapping[str, Any], num_layers: int) -> tuple[int | None, ...]:
    """Return each layer's sliding window, or None for full attention."""
    window = config.get("sliding_window")
    if window is not None and (not isinstance(window, int) or window < 1):
        raise config_error("invalid_sliding_window", f"sliding_window to be a number of tokens or null, got {window!r}")
    kinds = config.get("layer_types")
    if kinds is None:
        kinds = _layer_kinds(config, num_layers) if window is not None else [FULL] * num_layers
    if not isinstance(kinds, list) or len(kinds) != num_layers or not all(isinstance(kind, str) for kind in kinds):
        raise config_error("invalid_layer_types", f"layer_types to name a kind for each of {num_layers} layers")
    family = FAMILIES.get(str(config.get("model_type")))
    is_hybrid = family is not None and family.recurrent is not None
    allowed = {FULL, SLIDING} | ({ATTENTION, *RECURRENT_TYPES} if is_hybrid else set())
    unknown = sorted(set(kinds) - allowed)
    if unknown:
        expected = "layers of full or sliding attention, or recurrent layers of a family that quire implements"
        raise config_error("unsupported_layer_kind", f"{expected}, got {', '.join(unknown)}", "choose another model")
    return tuple(window if kind == SLIDING else None for kind in kinds)


def rope_parameters(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config's `rope_parameters`; if missing, from the older `rope_theta` and `rope_scaling`."""
    parameters = dict(object_of(config, "rope_parameters") or object_of(config, "rope_scaling"))
    parameters.setdefault("rope_theta", config.get("rope_theta", 10000.0))
    parameters["rope_type"] = parameters.get("rope_type", parameters.get("type", "default"))
    parameters.setdefault("original_max_position_embeddings", config.get("original_max_position_embeddings"))
    if config.get("partial_rotary_factor") is not None:
        parameters.setdefault("partial_rotary_factor", config["partial_rotary_factor"])
    return parameters


def rope_of(family: Family, config: Mapping[str, Any], kind: str, layer: int, head_size: int) -> RopeRule:
    """Return the RoPE rule of layer number `layer`, whose attention is of this kind (FULL or SLIDING)."""
    if not _has_rope(config, layer) or (family.rope_switch and config.get(family.rope_switch) != "rope"):
        return RopeRule(head_size, 0, ())
    parameters = object_of(config, "rope_parameters")
    if FULL in parameters or SLIDING in parameters:
        rope = rope_parameters({"rope_parameters": object_of(parameters, kind)})
    else:
        rope = rope_parameters(config)
        if kind == SLIDING and family.sliding_rope is not SlidingRope.SAME:
            base = config["rope_local_base_freq"] if family.sliding_rope is SlidingRope.LOCAL else rope["rope_theta"]
            rope = rope_parameters({"rope_theta": base})
    for name in ("rope_theta", "factor", "original_max_position_embeddings"):
        number_of(rope, name, 1.0)
    share_rotated = number_of(rope, "partial_rotary_factor", 1.0, 1.0)
    num_rotated = head_size if rope["rope_type"] == "proportional" else int(head_size * share_rotated)
    if num_rotated % 2:
        raise config_error("odd_rotated_values", f"an even number of rotated values per head, got {num_rotated}")
    return RopeRule(head_size, num_rotated, tuple(sorted(rope.items())))


def _has_rope(config: Mapping[str, Any], layer: int) -> bool:
    num_layers = size_of(config, "num_hidden_layers")
    layers = config.get("no_rope_layers")
    if layers is not None:
        if not isinstance(layers, list) or len(layers) < num_layers:
            raise config_error("invalid_no_rope_layers", f"an entry of no_rope_layers for each of {num_layers} layers")
        return bool(layers[layer])
    return "no_rope_layer_interval" not in config or (layer + 1) % size_of(config, "no_rope_layer_interval") != 0


def _layer_kinds(config: Mapping[str, Any], num_layers: int) -> list[str]:
    """Derive layer kinds if the config has a window but no layer_types."""
    family = FAMILIES.get(str(config.get("model_type")))
    interval = family.full_interval if family else 0
    interval = size_of(config, "sliding_window_pattern", interval) if interval else 0
    if interval:
        return [FULL if (layer + 1) % interval == 0 else SLIDING for layer in range(num_layers)]
    if "use_sliding_window" not in config and config.get("model_type") not in MIXED_WINDOWS:
        return [SLIDING] * num_layers
    num_full = config.get("max_window_layers", num_layers) if config.get("use_sliding_window") else num_layers
    return [FULL if layer < num_full else SLIDING for layer in range(num_layers)]
