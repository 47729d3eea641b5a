"""Rotary position embeddings: the frequency of each pair of head elements, for scalings compatible with a prefix cache.

A cached key must remain valid while the sequence grows, so scalings whose frequencies depend on the sequence length
(`dynamic`, `longrope`) are rejected.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from quire.backends.kernels.arrays import Floats
from quire.checkpoints.families.layer_rules import RopeRule
from quire.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class Rope:
    """RoPE frequencies, and a factor for the rotated values."""

    frequencies: Floats
    scaling: float = 1.0


def read_rope(rule: RopeRule) -> Rope:
    """Return a frequency per pair of head elements (0: not rotated). Raises CheckpointError for an invalid rule."""
    pairs = rule.head_size // 2
    if not rule.parameters:
        return Rope(np.zeros(pairs, np.float32))
    rope, size = dict(rule.parameters), rule.num_rotated
    kind = rope["rope_type"]
    if kind not in _SCALINGS:
        raise CheckpointError(
            f"config.json: expected RoPE scaling to be one of {', '.join(_SCALINGS)}, got {kind!r}: scaling that "
            "depends on the length of a sequence cannot share a prefix cache; choose another model",
            code="unsupported_rope",
        )
    try:
        with np.errstate(all="ignore"):
            base = float(rope["rope_theta"])
            exponents = np.arange(0, size, 2, dtype=np.float32) / np.float32(size)
            plain: Floats = np.float32(1) / (base ** exponents.astype(np.float64)).astype(np.float32)
            made = _SCALINGS[kind](plain, rope, base)
    except (KeyError, TypeError, ValueError, ArithmeticError) as error:
        message = f"the RoPE parameters of config.json are not valid: {rope} ({error}); download the model again"
        raise CheckpointError(message, code="invalid_rope") from error
    if not bool(np.isfinite(made.frequencies).all()) or not math.isfinite(made.scaling):
        message = f"the RoPE parameters of config.json give no finite frequencies: {rope}; download the model again"
        raise CheckpointError(message, code="invalid_rope")
    still = np.zeros(pairs - len(made.frequencies), np.float32)
    if len(still) and made.scaling != 1.0:
        raise CheckpointError(
            "config.json: expected partly rotated heads or RoPE scaling, got both; choose another model"
        )
    return Rope(np.concatenate([made.frequencies, still]), made.scaling)


def _default(plain: Floats, _rope: Mapping[str, Any], _base: float) -> Rope:
    return Rope(plain)


def _linear(plain: Floats, rope: Mapping[str, Any], _base: float) -> Rope:
    return Rope(plain / np.float32(rope["factor"]))


def _proportional(plain: Floats, rope: Mapping[str, Any], _base: float) -> Rope:
    """Rotate the first pairs with the frequencies of full rotation, and leave the other pairs fixed."""
    num_turning = int(float(rope.get("partial_rotary_factor", 1.0)) * 2 * len(plain) // 2)
    factor = np.float32(rope.get("factor") or 1.0)
    return Rope(np.where(np.arange(len(plain)) < num_turning, plain / factor, np.float32(0)))


def _llama3(plain: Floats, rope: Mapping[str, Any], _base: float) -> Rope:
    """Divide low frequencies by the factor, keep high ones, and blend those in between."""
    factor, low, high = float(rope["factor"]), float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
    length = float(rope["original_max_position_embeddings"])
    waves = 2 * math.pi / plain
    blend = (length / waves - low) / (high - low)
    blended = (1 - blend) * plain / factor + blend * plain
    slow, fast = waves > length / low, waves < length / high
    return Rope(np.where(slow, plain / factor, np.where(fast, plain, blended)).astype(np.float32))


def _yarn(plain: Floats, rope: Mapping[str, Any], base: float) -> Rope:
    """Stretch frequencies by a ramp between two rotation counts (beta_fast, beta_slow); scale values up slightly."""
    factor, size = float(rope["factor"]), 2 * len(plain)
    length = float(rope["original_max_position_embeddings"])

    def dimension(turns: float) -> float:
        return size * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(base))

    first, last = dimension(float(rope.get("beta_fast") or 32)), dimension(float(rope.get("beta_slow") or 1))
    if rope.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, size - 1)
    span = last - first if last != first else 0.001
    stretched = np.clip((np.arange(len(plain), dtype=np.float32) - np.float32(first)) / np.float32(span), 0, 1)
    frequencies = plain / factor * stretched + plain * (1 - stretched)
    return Rope(frequencies.astype(np.float32), _yarn_scaling(rope, factor))


def _yarn_scaling(rope: Mapping[str, Any], factor: float) -> float:
    if rope.get("attention_factor") is not None:
        return float(rope["attention_factor"])

    def growth(share: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * share * math.log(factor) + 1.0

    one, all_dimensions = rope.get("mscale"), rope.get("mscale_all_dim")
    return growth(float(one)) / growth(float(all_dimensions)) if one and all_dimensions else growth(1.0)


_SCALINGS = {
    "default": _default, "linear": _linear, "llama3": _llama3, "yarn": _yarn, "proportional": _proportional
}  # fmt: skip
