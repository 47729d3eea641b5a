"""Per-layer rules of a config: the sliding window and RoPE of each layer."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quire.checkpoints.families.config_fields import number_of, object_of, refused, size_of
from quire.checkpoints.families.family import Family, SlidingRope
from quire.checkpoints.families.family_table import FAMILIES
from quire.checkpoints.families.recurrent import RECURRENT_TYPES

FULL, SLIDING = "full_attention", "sliding_attention"
ATTENTION = "attention"
"""Name of full attention in configs with recurrent layers."""
MIXED_WINDOWS = frozenset({"qwen2", "qwen3", "qwen3_moe", "smollm3"})
"""Families whose window applies only if use_sliding_window is true."""


@dataclass(frozen=True, slots=True)
class RopeRule:
    """RoPE of a layer's heads. Empty parameters: no RoPE."""

    head_size: int
    num_rotated: int
    """Rotated elements at the start of a head; the others are not rotated."""
    parameters: tuple[tuple[str, Any], ...]


def windows_of(config: Mapping[str, Any], num_layers: int) -> tuple[int | None, ...]:
    """Return each layer's sliding window, or None for full attention."""
    window = config.get("sliding_window")
    if window is not None and (not isinstance(window, int) or window < 1):
        raise refused("invalid_sliding_window", f"sliding_window to be a number of tokens or null, got {window!r}")
    kinds = config.get("layer_types")
    if kinds is None:
        kinds = _layer_kinds(config, num_layers) if window is not None else [FULL] * num_layers
    if not isinstance(kinds, list) or len(kinds) != num_layers or not all(isinstance(kind, str) for kind in kinds):
        raise refused("invalid_layer_types", f"layer_types to name a kind for each of {num_layers} layers")
    family = FAMILIES.get(str(config.get("model_type")))
    is_hybrid = family is not None and family.recurrent is not None
    known = {FULL, SLIDING} | ({ATTENTION, *RECURRENT_TYPES} if is_hybrid else set())
    strange = sorted(set(kinds) - known)
    if strange:
        rule = "layers of full or sliding attention, or recurrent layers of a family that quire implements"
        raise refused("unsupported_layer_kind", f"{rule}, got {', '.join(strange)}", "choose another model")
    return tuple(window if kind == SLIDING else None for kind in kinds)


def rope_parameters(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return `rope_parameters`, also from the older fields `rope_theta` and `rope_scaling`."""
    found = dict(object_of(config, "rope_parameters") or object_of(config, "rope_scaling"))
    found.setdefault("rope_theta", config.get("rope_theta", 10000.0))
    found["rope_type"] = found.get("rope_type", found.get("type", "default"))
    found.setdefault("original_max_position_embeddings", config.get("original_max_position_embeddings"))
    if config.get("partial_rotary_factor") is not None:
        found.setdefault("partial_rotary_factor", config["partial_rotary_factor"])
    return found


def rope_of(family: Family, config: Mapping[str, Any], kind: str, at: int, head_size: int) -> RopeRule:
    """Return the RoPE rule of layer number `at`, which has this kind."""
    if not _is_turned(config, at) or (family.turns_by and config.get(family.turns_by) != "rope"):
        return RopeRule(head_size, 0, ())
    parameters = object_of(config, "rope_parameters")
    if FULL in parameters or SLIDING in parameters:
        found = rope_parameters({"rope_parameters": object_of(parameters, kind)})
    else:
        found = rope_parameters(config)
        if kind == SLIDING and family.sliding_rope is not SlidingRope.SAME:
            base = config["rope_local_base_freq"] if family.sliding_rope is SlidingRope.LOCAL else found["rope_theta"]
            found = rope_parameters({"rope_theta": base})
    for name in ("rope_theta", "factor", "original_max_position_embeddings"):
        number_of(found, name, 1.0)
    share = number_of(found, "partial_rotary_factor", 1.0, 1.0)
    num_rotated = head_size if found["rope_type"] == "proportional" else int(head_size * share)
    if num_rotated % 2:
        raise refused("odd_rotated_values", f"an even number of rotated values per head, got {num_rotated}")
    return RopeRule(head_size, num_rotated, tuple(sorted(found.items())))


def _is_turned(config: Mapping[str, Any], at: int) -> bool:
    count = size_of(config, "num_hidden_layers")
    layers = config.get("no_rope_layers")
    if layers is not None:
        if not isinstance(layers, list) or len(layers) < count:
            raise refused("invalid_no_rope_layers", f"an entry of no_rope_layers for each of {count} layers")
        return bool(layers[at])
    return "no_rope_layer_interval" not in config or (at + 1) % size_of(config, "no_rope_layer_interval") != 0


def _layer_kinds(config: Mapping[str, Any], num_layers: int) -> list[str]:
    """Derive layer kinds if the config has a window but no layer_types."""
    family = FAMILIES.get(str(config.get("model_type")))
    every = family.full_every if family else 0
    every = size_of(config, "sliding_window_pattern", every) if every else 0
    if every:
        return [FULL if (at + 1) % every == 0 else SLIDING for at in range(num_layers)]
    if "use_sliding_window" not in config and config.get("model_type") not in MIXED_WINDOWS:
        return [SLIDING] * num_layers
    first = config.get("max_window_layers", num_layers) if config.get("use_sliding_window") else num_layers
    return [FULL if at < first else SLIDING for at in range(num_layers)]
