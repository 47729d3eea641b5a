"""The roofline of a decode step on this machine: the shortest time that its products and memory reads allow.

bare    seconds of only the matrix products of a step at this row count (2 rows for 1)
roof    bare + KV bytes / memory bandwidth, measured as the native sum over 1 GiB

Both are timed in alternation with the step in one process, because a machine's speed drifts; results are medians.
"""

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from quire.backends.kernels import extension
from quire.backends.kernels.arrays import Array, Floats
from quire.backends.kernels.products import native_product
from quire.backends.kernels.threads import num_threads
from quire.checkpoints.families import DecoderShape, is_decoder, read_shape
from quire.config import ModelSettings
from quire.errors import InvariantError

READ_BYTES = 1 << 30

Work = Callable[[], object]
Multiply = Callable[[Any], object]
"""Function that multiplies rows with one weight."""


@dataclass(frozen=True, slots=True)
class RoofPoint:
    """Median durations in seconds, and the memory bandwidth. See the module docstring."""

    step_s: float
    bare_s: float
    roof_s: float
    bytes_per_s: float


@dataclass(frozen=True, slots=True)
class CpuRoof:
    """The roofline of a model, or the reason why it cannot be measured."""

    shape: DecoderShape | None
    reason: str = ""
    """Why there is no roofline; empty if there is one."""

    @classmethod
    def of(cls, config: Mapping[str, Any], settings: ModelSettings, types: Set[str] = frozenset({"F32"})) -> "CpuRoof":
        """Return the roofline for a model with this config and these matrix dtypes."""
        device = settings.device
        dtype = ", ".join(sorted(types)) if settings.dtype == "auto" else settings.dtype
        if settings.backend == "mlx":
            return cls(None, "the model runs through mlx-lm's own modules")
        if not is_decoder(config) or settings.backend == "torch":
            return cls(None, "the model runs through transformers' own modules")
        if dtype not in {"F32", "float32"} or device != "cpu":
            return cls(None, f"the roofline is measured for float32 on a CPU only, got {dtype} on {device}")
        if not extension.availability().is_available:
            return cls(None, extension.availability().reason)
        return cls(read_shape(config))

    def measure(self, step: Work, num_rows: int, kv_bytes: float, num_steps: int) -> RoofPoint:
        """Time the step and its roofline in alternation. Raises InvariantError if there is no roofline."""
        if self.shape is None:
            raise InvariantError(f"expected a model with a roofline, got none: {self.reason}")
        data = np.ones(READ_BYTES // 4, np.float32)
        rows = max(2, num_rows)
        bare = Bare(self.shape, rows, rows, native_product)
        medians = interleaved_calls({"step": step, "bare": bare.run, "read": lambda: read_sum(data)}, num_steps)
        bare_s, bytes_per_s = medians["bare"], READ_BYTES / medians["read"]
        return RoofPoint(medians["step"], bare_s, bare_s + kv_bytes / bytes_per_s, bytes_per_s)


def read_sum(data: Array, threads: int | None = None) -> float:
    """Return the sum of `data`, read as fast as this machine can: the limit of every memory-bound operation."""
    total: float = extension.kernels().read_sum(data.ctypes.data, data.nbytes, threads or num_threads())
    return total


def interleaved_calls(calls: Mapping[str, Work], num_rounds: int) -> dict[str, float]:
    """Time the calls alternately; the first round is discarded. Returns medians in seconds."""
    times_s: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(num_rounds + 1):
        for name, call in calls.items():
            started_s = perf_counter()
            call()
            times_s[name].append(perf_counter() - started_s)
    return {name: median(durations_s[1:]) for name, durations_s in times_s.items()}


class Bare:
    """Only the matrix products of a step with this row count: all layers, then the head for some rows.

    `parts` repeats each layer's products, like a step that is divided into chunks of rows. `prepare` returns a function
    that multiplies rows with a weight; `prepare_head` does so for the head's weight (None: `prepare`).
    """

    def __init__(
        self,
        shape: DecoderShape,
        num_rows: int,
        head_rows: int,
        prepare: Callable[[Floats], Multiply],
        prepare_head: Callable[[Floats], Multiply] | None = None,
        parts: int = 1,
    ) -> None:
        hidden, mlp_size, generator = shape.hidden_size, shape.intermediate_size, np.random.default_rng(1)

        def numbers(*size: int) -> Floats:
            return generator.standard_normal(size, np.float32)

        qkv = shape.query_size + 2 * shape.kv_size
        sizes = ((qkv, hidden), (hidden, shape.query_size), (2 * mlp_size, hidden), (hidden, mlp_size))
        self._layers = [[prepare(numbers(*size)) for size in sizes] for _ in range(shape.num_layers)]
        self._inputs = [numbers(num_rows, size) for _, size in sizes]
        self._head = (prepare_head or prepare)(numbers(shape.vocabulary_size, hidden))
        self._head_input = numbers(head_rows, hidden)
        self._parts = parts

    def run(self) -> None:
        """Run the products of one step."""
        for layer in self._layers:
            for product, rows in zip(layer, self._inputs, strict=True):
                for _ in range(self._parts):
                    product(rows)
        self._head(self._head_input)
