"""A config.json in the words that mlx-lm's models read. Pure.

Newer configs keep all that turns positions in one object, by kind of layer where kinds differ; mlx-lm reads the fields
that stood there before. What it does not find it does without, silently: a model would run with another rotation.
"""

from collections.abc import Mapping
from typing import Any

FULL, SLIDING = "full_attention", "sliding_attention"


def older_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """Fields to add to this config, or to the text part of one; none that it has is changed."""
    found: dict[str, Any] = {}
    text = config.get("text_config")
    if isinstance(text, dict):
        found["text_config"] = {**text, **older_fields(text)}
    rope = config.get("rope_parameters")
    if isinstance(rope, dict):
        found |= _rotation(rope)
    if isinstance(experts := config.get("num_local_experts"), int):
        found["num_experts"] = experts
    return {name: value for name, value in found.items() if config.get(name) is None or name == "text_config"}


def _rotation(rope: Mapping[str, Any]) -> dict[str, Any]:
    if isinstance(rope.get(FULL), dict):
        found = _rotation(rope[FULL])
        if isinstance(sliding := rope.get(SLIDING), dict) and "rope_theta" in sliding:
            found["rope_local_base_freq"] = sliding["rope_theta"]
        return found
    found = {name: rope[name] for name in ("rope_theta", "partial_rotary_factor") if rope.get(name) is not None}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        found["rope_scaling"] = {**rope, "type": kind, "rope_type": kind}
    return found
