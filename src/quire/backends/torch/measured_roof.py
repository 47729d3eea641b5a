"""The roof of a model whose products are packed: the products alone, and a sum over memory for its bandwidth.

Each is timed interleaved with the step in one process, because a machine drifts; figures are medians.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any

import torch

from quire.backends.roof import RoofPoint
from quire.backends.torch import native
from quire.backends.torch.linear import LinearKind
from quire.backends.torch.models.decoder_config import is_decoder, read_shape

READ_BYTES = 1 << 30

Work = Callable[[], object]
PrepareCall = Callable[[Any], Callable[[Any], object]]
"""From a weight to a product with it."""


@dataclass(frozen=True, slots=True)
class TorchRoof:
    """Of one model."""

    shape: Any
    reason: str = ""

    @classmethod
    def of(cls, config: Mapping[str, Any], dtype: str, device: str) -> "TorchRoof":
        """For the model of this config."""
        if not is_decoder(config):
            return cls(None, "the model runs through transformers' own modules")
        if dtype != "float32" or device != "cpu":
            return cls(None, f"it is measured for float32 on a CPU, this is {dtype} on {device}")
        if not native.available().is_available:
            return cls(None, native.available().reason)
        return cls(read_shape(config))

    def beside(self, step: Work, num_rows: int, kv_bytes: float, num_steps: int) -> RoofPoint:
        """The step and its roof, interleaved."""
        data = torch.ones(READ_BYTES // 4)
        rows = max(2, num_rows)
        prepares = {name: LinearKind(name, "").prepare for name in ("native", "onednn")}
        products = {name: Bare(self.shape, rows, rows, prepare, prepare).run for name, prepare in prepares.items()}
        taken = interleaved_calls({"step": step, **products, "read": lambda: native.read_sum(data)}, num_steps)
        bare_s, bytes_per_s = min(taken[name] for name in products), READ_BYTES / taken["read"]
        return RoofPoint(taken["step"], bare_s, bare_s + kv_bytes / bytes_per_s, bytes_per_s)


def interleaved_calls(calls: Mapping[str, Work], num_rounds: int) -> dict[str, float]:
    """Each call in turn, round after round; the first round is not counted. Medians in seconds."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(num_rounds + 1):
        for name, call in calls.items():
            started_s = perf_counter()
            call()
            times[name].append(perf_counter() - started_s)
    return {name: median(taken[1:]) for name, taken in times.items()}


class Bare:
    """The products of a step at exactly this many rows, and nothing else: all layers, then the head of some rows.

    `parts` takes the layers' rows so many times, as a step does that is cut into chunks of rows. Weights of the layers
    and of the head are prepared by the two functions.
    """

    def __init__(
        self, shape: Any, num_rows: int, head_rows: int, prepare: PrepareCall, prepare_head: PrepareCall, parts: int = 1
    ) -> None:
        hidden, wide = shape.hidden_size, shape.intermediate_size
        qkv = shape.query_size + 2 * shape.kv_size
        sizes = ((qkv, hidden), (hidden, shape.query_size), (2 * wide, hidden), (hidden, wide))
        self._layers = [[prepare(torch.randn(*size)) for size in sizes] for _ in range(shape.num_layers)]
        self._inputs = [torch.randn(num_rows, size) for _, size in sizes]
        self._head = prepare_head(torch.randn(shape.vocabulary_size, hidden))
        self._head_input = torch.randn(head_rows, hidden)
        self._parts = parts
        self._inference = torch.inference_mode

    def run(self) -> None:
        """One step's worth."""
        with self._inference():
            for layer in self._layers:
                for product, rows in zip(layer, self._inputs, strict=True):
                    for _ in range(self._parts):
                        product(rows)
            self._head(self._head_input)
