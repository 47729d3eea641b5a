"""The fastest a decode step could be on this machine, measured beside the step itself.

    bare    the products of a step alone, by the fastest packed operator at exactly these rows (two for one)
    roof    bare + KV bytes / bandwidth, the best native sum over 1 GiB

Each is timed turn about with the step in one process, because a machine drifts; figures are medians. Asked by
`bench/engine.py` only; knows the torch backend's packed products, and imports torch when it is used.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any

READ_BYTES = 1 << 30

Work = Callable[[], object]


@dataclass(frozen=True, slots=True)
class RoofPoint:
    """Medians, in seconds."""

    step_s: float
    bare_s: float
    roof_s: float
    bytes_per_s: float


@dataclass(frozen=True, slots=True)
class Roof:
    """What a model's products cost alone, or why that cannot be said."""

    shape: Any
    reason: str = ""

    @classmethod
    def of(cls, config: Mapping[str, Any], dtype: str, device: str) -> "Roof":
        """For the model of this config."""
        from quire.backends.torch import native  # noqa: PLC0415 - seconds of import
        from quire.backends.torch.models.shape import is_decoder, read_shape  # noqa: PLC0415

        if not is_decoder(config):
            return cls(None, "the model runs through transformers' own modules")
        if dtype != "float32" or device != "cpu":
            return cls(None, f"it is measured for float32 on a CPU, this is {dtype} on {device}")
        if not native.available().is_available:
            return cls(None, native.available().reason)
        return cls(read_shape(config))

    def beside(self, step: Work, num_rows: int, kv_bytes: float, num_steps: int) -> RoofPoint:
        """The step and its roof, turn about."""
        import torch  # noqa: PLC0415

        from quire.backends.torch import native  # noqa: PLC0415

        data = torch.ones(READ_BYTES // 4)
        products = [_bare(self.shape, max(2, num_rows), name) for name in ("mkl", "onednn")]
        calls: dict[str, Work] = {"step": step, "mkl": products[0], "onednn": products[1]}
        taken = turn_about({**calls, "read": lambda: native.read_sum(data)}, num_steps)
        bare_s, bytes_per_s = min(taken["mkl"], taken["onednn"]), READ_BYTES / taken["read"]
        return RoofPoint(taken["step"], bare_s, bare_s + kv_bytes / bytes_per_s, bytes_per_s)


def turn_about(calls: Mapping[str, Work], num_rounds: int) -> dict[str, float]:
    """Each call in turn, round after round; the first round is not counted. Medians in seconds."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(num_rounds + 1):
        for name, call in calls.items():
            started_s = perf_counter()
            call()
            times[name].append(perf_counter() - started_s)
    return {name: median(taken[1:]) for name, taken in times.items()}


def _bare(shape: Any, num_rows: int, name: str) -> Work:
    """The products of one step at exactly this many rows, and nothing else."""
    import torch  # noqa: PLC0415

    from quire.backends.torch.linear import LinearKind  # noqa: PLC0415

    kind = LinearKind(name, "", (num_rows,) if name == "mkl" else ())
    hidden, wide = shape.hidden_size, shape.intermediate_size
    sizes = ((shape.query_size + 2 * shape.kv_size, hidden), (hidden, shape.query_size), (2 * wide, hidden))
    layers = [[kind.prepare(torch.randn(*size)) for size in (*sizes, (hidden, wide))] for _ in range(shape.num_layers)]
    inputs = [torch.randn(num_rows, size) for size in (hidden, shape.query_size, hidden, wide, hidden)]
    head = kind.prepare(torch.randn(shape.vocabulary_size, hidden))

    @torch.inference_mode()
    def run() -> None:
        for layer in layers:
            for product, rows in zip(layer, inputs, strict=False):
                product(rows)
        head(inputs[-1])

    return run
