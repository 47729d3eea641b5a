"""Matrix products with weights packed once. Only this module selects the implementation and calls oneDNN's private API.

With `F.linear` the bits of a row depend on the batch. Two implementations avoid that. A process uses only one of them,
because their results differ in the last bits:

    native   quire's own: one packed copy for any number of rows, no padding
    oneDNN   without quire's kernels: one packed copy, at least two rows, padded to a few row counts

Each is tested on this machine. If it is missing, wrong or not row-invariant, the next one is used (at last `F.linear`)
and the reason is recorded. The original weights are freed.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache

import torch
import torch.nn.functional as F  # noqa: N812 - the customary name

from quire.backends.kernels import products
from quire.backends.kernels.arrays import Floats
from quire.backends.kernels.large_pages import Arena

PackedLinear = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class LinearKind:
    """The selected implementation of matrix products, and the reason for the selection."""

    name: str
    """`native`, `onednn` or `plain`."""
    reason: str
    _arena: Arena = field(default_factory=Arena, compare=False, repr=False)

    @property
    def is_packed(self) -> bool:
        """Whether a row's bits depend only on that row."""
        return self.name != "plain"

    def padded(self, num_rows: int) -> int:
        """Return the row count to which this many rows must be padded."""
        return num_rows if self.name == "native" else padded(num_rows)

    def prepare(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> PackedLinear:
        """Return a function that multiplies rows, padded by `padded`, with this weight ([out, in], the rows' dtype)."""
        match self.name:
            case "native":
                return _prepare_native(weight, bias, self._arena)
            case "onednn":
                return _prepare_onednn(weight, bias)
            case _:
                return lambda rows: F.linear(rows, weight, bias)


def padded(num_rows: int) -> int:
    """Return a row count of at least two, one of few distinct counts, because libraries cache code for each count."""
    step = 2 if num_rows <= 8 else 4 if num_rows <= 16 else 8 if num_rows <= 64 else 32
    return max(2, -(-num_rows // step) * step)


def choose_kind(dtype: torch.dtype, device: torch.device) -> LinearKind:
    """Return the fastest implementation that passes its test, for weights and rows of this dtype."""
    if dtype != torch.float32 or device.type != "cpu":
        return LinearKind("plain", f"expected float32 weights on a CPU for packing, got {dtype} on {device.type}")
    if (reason := products.probe("float32")) is None:
        return LinearKind("native", "weights packed once for any rows")
    return LinearKind("onednn" if _probe_onednn() is None else "plain", reason)


@cache
def _probe_onednn() -> str | None:
    counts = tuple({padded(count) for count in products.PROBED_ROWS})

    def prepare(weight: Floats) -> Callable[[Floats], Floats]:
        product = _prepare_onednn(torch.from_numpy(weight), None)
        return lambda rows: product(torch.from_numpy(rows)).numpy()

    return products.check_products("oneDNN", prepare, products.LIBRARY_SHAPES, counts)


def _prepare_native(weight: torch.Tensor, bias: torch.Tensor | None, arena: Arena) -> PackedLinear:
    num_out, num_in = weight.shape
    bias_array = None if bias is None else bias.contiguous().numpy()
    packed = products.PackedProduct([weight.contiguous().numpy()], (num_out, num_in), bias_array, "float32", arena)

    def product(rows: torch.Tensor) -> torch.Tensor:
        # Explicit dtype and device, because torch's defaults may differ and the kernel writes float32.
        out = torch.empty(len(rows), num_out, dtype=torch.float32, device="cpu")
        packed.product(rows.numpy(), out.numpy())
        return out

    return product


def _prepare_onednn(weight: torch.Tensor, bias: torch.Tensor | None) -> PackedLinear:
    packed = torch.ops.mkldnn._reorder_linear_weight(weight)
    run = torch.ops.mkldnn._linear_pointwise

    def product(rows: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = run(rows, packed, bias, "none", [], "")
        return out

    return product
