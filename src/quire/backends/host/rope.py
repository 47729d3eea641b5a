"""Rotary position embeddings: the frequency of each pair of head elements, for all scalings that allow a prefix cache.

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
    num_pairs = rule.head_size // 2
    if not rule.parameters:
        return Rope(np.zeros(num_pairs, np.float32))
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
            base_frequencies: Floats = np.float32(1) / (base ** exponents.astype(np.float64)).astype(np.float32)
            result = _SCALINGS[kind](base_frequencies, rope, base)
    except (KeyError, TypeError, ValueError, ArithmeticError) as error:
        message = f"config.json: expected valid RoPE parameters, got {rope} ({error}); download the model again"
        raise CheckpointError(message, code="invalid_rope") from error
    if not bool(np.isfinite(result.frequencies).all()) or not math.isfinite(result.scaling):
        message = f"config.json: expected RoPE parameters with finite frequencies, got {rope}; download it again"
        raise CheckpointError(message, code="invalid_rope")
    fixed = np.zeros(num_pairs - len(result.frequencies), np.float32)
    if len(fixed) and result.scaling != 1.0:
        raise CheckpointError(
            "config.json: expected partly rotated heads or RoPE scaling, got both; choose another model"
        )
    return Rope(np.concatenate([result.frequencies, fixed]), result.scaling)


def _default(freqs: Floats, _rope: Mapping[str, Any], _base: float) -> Rope:
    return Rope(freqs)


def _linear(freqs: Floats, rope: Mapping[str, Any], _base: float) -> Rope:
    return Rope(freqs / np.float32(rope["factor"]))


def _proportional(freqs: Floats, rope: Mapping[str, Any], _base: float) -> Rope:
    """Rotate only the first pairs, with the same frequencies as in full rotation."""
    num_rotated = int(float(rope.get("partial_rotary_factor", 1.0)) * 2 * len(freqs) // 2)
    factor = np.float32(rope.get("factor") or 1.0)
    return Rope(np.where(np.arange(len(freqs)) < num_rotated, freqs / factor, np.float32(0)))


def _llama3(freqs: Floats, rope: Mapping[str, Any], _base: float) -> Rope:
    """Divide low frequencies by the factor, keep high ones, and blend those in between."""
    factor, low, high = float(rope["factor"]), float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
    length = float(rope["original_max_position_embeddings"])
    wavelengths = 2 * math.pi / freqs
    blend = (length / wavelengths - low) / (high - low)
    blended = (1 - blend) * freqs / factor + blend * freqs
    is_low, is_high = wavelengths > length / low, wavelengths < length / high
    return Rope(np.where(is_low, freqs / factor, np.where(is_high, freqs, blended)).astype(np.float32))


def _yarn(freqs: Floats, rope: Mapping[str, Any], base: float) -> Rope:
    """Divide low frequencies by the factor, with a ramp between two rotation counts (beta_fast, beta_slow)."""
    factor, size = float(rope["factor"]), 2 * len(freqs)
    context = float(rope["original_max_position_embeddings"])

    def dimension(num_rotations: float) -> float:
        return size * math.log(context / (num_rotations * 2 * math.pi)) / (2 * math.log(base))

    first, last = dimension(float(rope.get("beta_fast") or 32)), dimension(float(rope.get("beta_slow") or 1))
    if rope.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, size - 1)
    span = last - first if last != first else 0.001
    ramp = np.clip((np.arange(len(freqs), dtype=np.float32) - np.float32(first)) / np.float32(span), 0, 1)
    frequencies = freqs / factor * ramp + freqs * (1 - ramp)
    return Rope(frequencies.astype(np.float32), _yarn_scaling(rope, factor))


def _yarn_scaling(rope: Mapping[str, Any], factor: float) -> float:
    if rope.get("attention_factor") is not None:
        return float(rope["attention_factor"])

    def scaling_of(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    mscale, all_dim = rope.get("mscale"), rope.get("mscale_all_dim")
    return scaling_of(float(mscale)) / scaling_of(float(all_dim)) if mscale and all_dim else scaling_of(1.0)


_SCALINGS = {
    "default": _default, "linear": _linear, "llama3": _llama3, "yarn": _yarn, "proportional": _proportional
}  # fmt: skip
