"""What native/layers/recurrent.hpp wants to know of a recurrent layer, and where in a slot its state lies."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from quire.backends.cpu.weight_reader import WeightReader
from quire.backends.kernels.arrays import Floats
from quire.checkpoints.families import DecoderShape
from quire.checkpoints.families.family import RecurrentKind
from quire.checkpoints.families.recurrent import RecurrentShape
from quire.checkpoints.families.recurrent_tensors import PLACES

KINDS = {RecurrentKind.DELTA: 1, RecurrentKind.SPACE: 2, RecurrentKind.CONVOLUTION: 3}
"""As native/layers/recurrent.hpp numbers them."""
NO_RECURRENT = (0,) * 27 + (0.0, 0.0)
LINE_FLOATS = 16
"""Layers' parts of a slot begin at cache lines."""


class StateWeights:
    """Reads the small tensors of recurrent layers, one layer after the other."""

    def __init__(self, shape: DecoderShape, reader: WeightReader, keep: Callable[[Floats], int]) -> None:
        self._shape = shape
        self._reader = reader
        self._keep = keep
        """Gives an array's address and holds it as long as the decoder lives."""
        self.slot_size = 0

    def fields(self, layer: RecurrentShape, vectors: Mapping[str, tuple[int, ...]], prefix: str) -> tuple[Any, ...]:
        """One layer's, in the order of `layers.RECURRENT`."""
        place = prefix + PLACES[layer.kind]
        taps = f"{place}{'conv' if layer.kind is RecurrentKind.CONVOLUTION else 'conv1d'}"
        by_channel = self._reader.vector(f"{taps}.weight", vectors[f"{taps}.weight"])
        addresses = [self._keep(np.ascontiguousarray(by_channel.reshape(layer.num_channels, layer.num_taps).T))]
        addresses += [self._optional_vector(f"{taps}.bias", vectors), self._log_decay(f"{place}A_log", vectors)]
        addresses += [self._optional_vector(f"{place}{name}", vectors) for name in ("dt_bias", "D", "norm.weight")]
        keys, is_space = layer.num_key_heads * layer.key_size, layer.kind is RecurrentKind.SPACE
        mixed_at, gate_at, rate_at, step_at = _places_in_row(layer)
        in_mixed = (layer.out_size + keys, layer.out_size, 0) if is_space else (0, keys, 2 * keys)
        return (
            KINDS[layer.kind], *addresses, layer.num_taps, layer.num_channels,
            layer.num_key_heads, layer.num_heads, layer.key_size, layer.value_size, layer.is_tiled,
            mixed_at, gate_at, rate_at, step_at, *in_mixed, layer.in_size, layer.out_size, layer.norm_span, is_space,
            self._place(layer.history_size), self._place(layer.state_size), layer.least_step, layer.most_step,
        )  # fmt: skip

    def _place(self, size: int) -> int:
        first, self.slot_size = self.slot_size, self.slot_size + -(-size // LINE_FLOATS) * LINE_FLOATS
        return first

    def _optional_vector(self, name: str, vectors: Mapping[str, tuple[int, ...]]) -> int:
        return self._keep(self._reader.vector(name, vectors[name])) if name in vectors else 0

    def _log_decay(self, name: str, vectors: Mapping[str, tuple[int, ...]]) -> int:
        """Below zero; GGUF files have it so, others its logarithm."""
        if name not in vectors:
            return 0
        stored = self._reader.vector(name, vectors[name])
        return self._keep(stored if self._shape.is_gguf else -np.exp(stored))


def _places_in_row(layer: RecurrentShape) -> tuple[int, int, int, int]:
    """Of what is mixed, gates, rates and steps, in what the first product makes."""
    channels, out = layer.num_channels, layer.out_size
    match layer.kind:
        case RecurrentKind.DELTA:
            return 0, channels, channels + out, channels + out + layer.num_heads
        case RecurrentKind.SPACE:
            return out, 0, 0, out + channels
        case RecurrentKind.CONVOLUTION:
            return 2 * channels, 0, channels, 0
