"""The structures of native/step/forward.hpp as numpy dtypes, and the work buffers of a step.

Fields that end in `_at` are offsets. Buffers are sized for the largest step so far and reused by every step; memory
that is allocated but never written does not become resident.
"""

from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.backends.kernels.extension import kernels
from quire.checkpoints.families import DecoderShape
from quire.checkpoints.families.family import GateActivation
from quire.errors import InvariantError

PARTS = (
    "qkv", "out", "gate_up", "down", "attention", "rope_write", "add_rms_norm", "gated", "embed", "head", "argmax",
    "router", "experts", "per_layer", "mix", "scan",
)  # fmt: skip
"""The parts of a native call that can be timed, in the order of `Decoder.time_parts`."""
CHUNK_ROWS = 256
"""Rows that pass through a chain of matrix products at once, so that each product finds its input in the CPU cache."""
GATES = {GateActivation.SILU: 0, GateActivation.GELU_TANH: 1, GateActivation.CLAMPED_SILU: 2}
"""The numbers of these functions in native/builds/kernels.hpp."""

LINEAR = np.dtype([
    *((name, "i8") for name in ("packing", "format", "arithmetic", "group")),
    ("packed", "u8"), ("bias", "u8"), ("num_in", "i8"), ("num_out", "i8"),
])  # fmt: skip
MIXTURE = np.dtype([
    ("router", LINEAR),
    *((name, "u8") for name in ("router_norm", "input_norm", "dense_norm", "after_norm", "expert_scales")),
    *((name, "u8") for name in ("gate_up", "down")),
    *((name, "i8") for name in ("num_experts", "num_used", "intermediate_size", "is_shared_by_all", "is_sigmoid")),
    ("choice_bias", "u8"), ("dense_gate", "u8"), ("least_total", "f8"), ("scale", "f8"),
])  # fmt: skip
PER_LAYER = np.dtype([("gate", LINEAR), ("project", LINEAR), ("after_norm", "u8")])
RECURRENT = np.dtype([
    ("kind", "i8"),
    *((name, "u8") for name in ("taps", "tap_bias", "log_decay", "step_bias", "skip", "norm")),
    *((name, "i8") for name in ("num_taps", "num_channels", "num_key_heads", "num_heads", "key_size", "value_size")),
    *((name, "i8") for name in ("is_tiled", "mixed_at", "gate_at", "rate_at", "step_at")),
    *((name, "i8") for name in ("query_at", "key_at", "value_at", "in_size", "out_size", "norm_span")),
    *((name, "i8") for name in ("is_gated_first", "history_at", "state_at")),
    ("least_step", "f8"), ("most_step", "f8"),
])  # fmt: skip
LAYER = np.dtype([
    *((name, "u8") for name in ("input_norm", "attention_norm", "mlp_norm", "after_norm")),
    *((name, "u8") for name in ("query_norm", "key_norm", "value_norm", "sinks")),
    ("qkv", LINEAR, 4), ("out", LINEAR), ("gate_up", LINEAR, 2), ("down", LINEAR),
    ("mixture", MIXTURE), ("per_layer", PER_LAYER), ("recurrent", RECURRENT),
    *((name, "i8") for name in ("window", "num_kv_heads", "head_size", "intermediate_size")),
    *((name, "i8") for name in ("has_kv", "has_values", "has_gate", "query_span", "key_span", "rope", "number")),
    ("scale", "f8"),
])  # fmt: skip
ROPE = np.dtype([("frequencies", "u8"), ("scaling", "f8"), ("head_size", "i8"), ("first", "i8")])
STORE = np.dtype([("keys", "u8"), ("values", "u8"), ("key_block_stride", "i8"), ("value_block_stride", "i8")])
WORD_BYTES = 8
"""Bytes per field."""
NO_LINEAR = (0, 0, 0, 0, 0, 0, 0, 0)
CALL = np.dtype([
    ("embedding", LINEAR), ("head", LINEAR), ("per_layer_embedding", LINEAR), ("per_layer_projection", LINEAR),
    ("per_layer_norm", "u8"), ("per_layer_size", "i8"),
    *((name, "f8") for name in ("per_layer_scale", "projection_scale", "per_layer_sum_scale")),
    *((name, "u8") for name in ("layers", "stores", "states")), ("slot_size", "i8"), ("ropes", "u8"),
    *((name, "i8") for name in ("num_layers", "num_all_layers", "num_ropes")),
    ("norm", "u8"),
    *((name, "f8") for name in ("eps", "scale", "softcap")),
    *((name, "f8") for name in ("embedding_scale", "added_scale", "logit_scale", "logit_cap")),
    *((name, "f8") for name in ("query_beta", "query_origin")),
    *((name, "i8") for name in ("num_heads", "hidden_size", "gate", "angles_size", "most_head_size", "most_group")),
    *((name, "i8") for name in ("kv_type", "block_size")),
    *((name, "u8") for name in ("tokens", "positions", "blocks", "slots", "tables", "members", "tiles")),
    *((name, "u8") for name in ("wanted", "needed", "run_rows", "run_slots")),
    *((name, "i8") for name in ("num_tiles", "num_rows", "num_wanted", "num_needed", "num_sampled", "num_threads")),
    ("num_runs", "i8"),
    *((name, "u8") for name in ("hidden", "logits", "likeliest", "is_sound", "is_finite")),
    *((name, "u8") for name in ("residual", "added", "queries", "answers", "cos", "sin")),
    *((name, "u8") for name in ("query_scales", "per_layer", "picked", "gates", "qkv", "mixed", "rates")),
    *((name, "u8") for name in ("gate_up", "gated")),
    ("chunk_rows", "i8"), ("seconds", "u8"),
])  # fmt: skip
STEP = (
    "tokens", "positions", "blocks", "slots", "tables", "members", "tiles", "wanted", "needed", "run_rows", "run_slots",
    "num_tiles", "num_rows", "num_wanted", "num_needed", "num_sampled", "num_threads", "num_runs",
)  # fmt: skip
"""The fields of CALL that change with every step; they are contiguous."""


@cache
def check_layout() -> None:
    """Raise InvariantError if the extension was built with other structure sizes."""
    native_sizes = (kernels().layer_bytes(), kernels().rope_rule_bytes(), kernels().decoder_call_bytes())
    sizes = (LAYER.itemsize, ROPE.itemsize, CALL.itemsize)
    if native_sizes != sizes:
        raise InvariantError(f"expected kernels with structures of {sizes} bytes, got {native_sizes}; "
                             "build quire._native again")  # fmt: skip


class Call:
    """The argument of the native call, a CALL structure."""

    def __init__(self, fields: NDArray[Any]) -> None:
        self.fields = fields
        self.address: int = fields.ctypes.data
        step_index = (fields[STEP[0]].ctypes.data - self.address) // WORD_BYTES
        self._step = fields.reshape(1).view(np.int64)[step_index : step_index + len(STEP)]

    def write_step(self, *numbers: int) -> None:
        """Write all fields of STEP at once."""
        self._step[:] = numbers


class Buffers:
    """Work buffers of one step with `num_rows` rows, `num_requested` of which need logits."""

    def __init__(self, shape: DecoderShape, angles_size: int, num_rows: int, num_requested: int) -> None:
        chunk_rows = min(num_rows, CHUNK_ROWS)
        self.num_rows, self.num_requested = num_rows, num_requested
        self.logits = np.empty((num_requested, shape.vocabulary_size), np.float32)
        self.likeliest = np.empty(num_requested, np.int64)
        self.is_sound = np.empty(num_requested, np.bool_)
        self.picked = np.empty((num_requested, shape.hidden_size), np.float32)
        self.residual = np.empty((num_rows, shape.hidden_size), np.float32)
        self.hidden = np.empty_like(self.residual)
        self.added = np.empty_like(self.residual)
        self.is_finite = np.empty(num_rows, np.bool_)
        self.queries = np.empty((num_rows, shape.query_size), np.float32)
        recurrent = shape.recurrent
        self.answers = np.empty((num_rows, max(shape.query_size, recurrent.out_size if recurrent else 0)), np.float32)
        self.gates = np.empty((num_rows, shape.query_size if shape.family.has_output_gate else 0), np.float32)
        self.cos = np.empty((num_rows, angles_size), np.float32)
        self.sin = np.empty_like(self.cos)
        self.query_scales = np.empty(num_rows, np.float32)
        self.per_layer = np.empty((num_rows, shape.num_layers * shape.per_layer_size), np.float32)
        attention_size = shape.query_size * (1 + shape.family.has_output_gate) + 2 * shape.kv_size
        self.qkv = np.empty((chunk_rows, max(attention_size, recurrent.in_size if recurrent else 0)), np.float32)
        self.mixed = np.empty((chunk_rows, recurrent.num_channels if recurrent else 0), np.float32)
        self.rates = np.empty((chunk_rows, 2 * recurrent.num_heads if recurrent else 0), np.float32)
        mlp_size = max(shape.intermediate_size, shape.per_layer_size)
        self.gate_up = np.empty((chunk_rows, 2 * mlp_size), np.float32)
        self.gated = np.empty((chunk_rows, mlp_size), np.float32)

    def write_addresses(self, call: NDArray[Any]) -> None:
        """Write the addresses of these buffers into a call's fields, which have the same names."""
        for name, array in vars(self).items():
            if isinstance(array, np.ndarray):
                call[name] = array.ctypes.data
