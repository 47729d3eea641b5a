"""The structures of native/decoder.hpp, laid out by numpy, and the buffers a step works in.

Buffers are made for the most rows seen so far and used again by every step; what is asked for and not touched takes no
memory.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.backends.host.decoder_shape import DecoderShape
from quire.backends.kernels.extension import kernels
from quire.errors import InvariantError

PARTS = (
    "qkv", "out", "gate_up", "down", "attention", "rope_write", "add_rms_norm", "silu_mul", "embed", "head", "argmax",
)  # fmt: skip
"""What a call can be asked to time, in the order of its seconds."""
CHUNK_ROWS = 256
"""Rows that a chain of products takes at once: what one makes is still in the cache when the next reads it."""

LINEAR = np.dtype([
    *((name, "i8") for name in ("packing", "format", "arithmetic", "group")),
    ("packed", "u8"), ("bias", "u8"), ("num_in", "i8"), ("num_out", "i8"),
])  # fmt: skip
LAYER = np.dtype([
    *((name, "u8") for name in ("input_norm", "query_norm", "key_norm", "post_norm")),
    ("qkv", LINEAR, 3), ("out", LINEAR), ("gate_up", LINEAR, 2), ("down", LINEAR),
    ("window", "i8"),
])  # fmt: skip
WORD_BYTES = 8
"""Of every field."""
NO_LINEAR = (0, 0, 0, 0, 0, 0, 0, 0)
CALL = np.dtype([
    ("embedding", LINEAR), ("head", LINEAR),
    ("layers", "u8"), ("stores", "u8"), ("num_layers", "i8"), ("norm", "u8"), ("eps", "f8"), ("scale", "f8"),
    ("frequencies", "u8"), ("rope_scaling", "f8"),
    *((name, "i8") for name in ("num_heads", "num_kv_heads", "head_size", "hidden_size", "intermediate_size")),
    *((name, "i8") for name in ("key_block_stride", "value_block_stride", "kv_type", "block_size")),
    *((name, "u8") for name in ("tokens", "positions", "blocks", "slots", "tables", "members", "tiles")),
    *((name, "u8") for name in ("wanted", "needed")),
    *((name, "i8") for name in ("num_tiles", "num_rows", "num_wanted", "num_needed", "num_sampled", "num_threads")),
    *((name, "u8") for name in ("hidden", "logits", "likeliest", "is_sound", "is_finite")),
    *((name, "u8") for name in ("residual", "added", "queries", "answers", "cos", "sin", "picked")),
    *((name, "u8") for name in ("qkv", "gate_up", "gated")),
    ("chunk_rows", "i8"), ("seconds", "u8"),
])  # fmt: skip
STEP = (
    "tokens", "positions", "blocks", "slots", "tables", "members", "tiles", "wanted", "needed",
    "num_tiles", "num_rows", "num_wanted", "num_needed", "num_sampled", "num_threads",
)  # fmt: skip
"""Neighbours in CALL: what is another in every step."""
COMPUTED = ("hidden", "logits", "likeliest", "is_sound", "is_finite")
"""Of buffers: what a step comes to."""
BETWEEN = ("residual", "added", "queries", "answers", "cos", "sin", "picked", "qkv", "gate_up", "gated")


@cache
def check_layout() -> None:
    """Refuse an extension that was built from other structures."""
    built = (kernels().layer_bytes(), kernels().decoder_call_bytes())
    if built != (LAYER.itemsize, CALL.itemsize):
        raise InvariantError(f"the kernels take structures of {built} bytes, this source has {LAYER.itemsize} and "
                             f"{CALL.itemsize}; build quire._native again")  # fmt: skip


def layer_table(rows: Sequence[tuple[Any, ...]]) -> NDArray[Any]:
    """Layers as one array of LAYER."""
    return np.array(rows, LAYER)


class Call:
    """What the native call is given."""

    def __init__(self, fields: NDArray[Any]) -> None:
        self.fields = fields
        self.address: int = fields.ctypes.data
        first = (fields[STEP[0]].ctypes.data - self.address) // WORD_BYTES
        self._step = fields.reshape(1).view(np.int64)[first : first + len(STEP)]

    def tell_step(self, *numbers: int) -> None:
        """The fields of STEP, in one write."""
        self._step[:] = numbers


class Buffers:
    """What one step works in: so many rows, of which so many are wanted."""

    def __init__(self, shape: DecoderShape, num_rows: int, num_wanted: int) -> None:
        chunk = min(num_rows, CHUNK_ROWS)
        self.num_rows, self.num_wanted = num_rows, num_wanted
        self.logits = np.empty((num_wanted, shape.vocabulary_size), np.float32)
        self.likeliest = np.empty(num_wanted, np.int64)
        self.is_sound = np.empty(num_wanted, np.bool_)
        self.picked = np.empty((num_wanted, shape.hidden_size), np.float32)
        self.residual = np.empty((num_rows, shape.hidden_size), np.float32)
        self.hidden = np.empty_like(self.residual)
        self.added = np.empty_like(self.residual)
        self.is_finite = np.empty(num_rows, np.bool_)
        self.queries = np.empty((num_rows, shape.query_size), np.float32)
        self.answers = np.empty_like(self.queries)
        self.cos = np.empty((num_rows, shape.head_size), np.float32)
        self.sin = np.empty_like(self.cos)
        self.qkv = np.empty((chunk, shape.query_size + 2 * shape.kv_size), np.float32)
        self.gate_up = np.empty((chunk, 2 * shape.intermediate_size), np.float32)
        self.gated = np.empty((chunk, shape.intermediate_size), np.float32)

    def tell(self, call: NDArray[Any]) -> None:
        """Write the addresses into a call."""
        for name in (*COMPUTED, *BETWEEN):
            call[name] = getattr(self, name).ctypes.data
