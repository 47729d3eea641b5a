"""Matrix products with weights packed once. Only this module selects the product and calls oneDNN's private operator.

With `F.linear` the bits of a row depend on the batch. Two packed products avoid that. A process uses one of them
throughout, because their results differ in the last bits:

    native   quire's own: one copy for any number of rows, no padding
    oneDNN   if there was no compiler: one copy, at least two rows, padded to a few row counts

Each product is tested on this machine. If it is missing, wrong or not row-invariant, the next one is used and the
reason recorded. The original weights are not kept.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache

import torch
import torch.nn.functional as F  # noqa: N812 - as everyone writes it

from quire.backends.kernels import products
from quire.backends.kernels.arrays import Floats
from quire.backends.kernels.large_pages import Arena

PackedLinear = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class LinearKind:
    """The selected kind of product, and the reason."""

    name: str
    """`native`, `onednn` or `plain`."""
    reason: str
    _arena: Arena = field(default_factory=Arena, compare=False, repr=False)

    @property
    def is_packed(self) -> bool:
        """Whether a row's bits depend only on that row."""
        return self.name != "plain"

    def padded(self, num_rows: int) -> int:
        """Return the row count that is computed for this many rows."""
        return num_rows if self.name == "native" else padded(num_rows)

    def prepare(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> PackedLinear:
        """Return a product function with this weight ([out, in], in the rows' dtype) for rows padded by `padded`."""
        match self.name:
            case "native":
                return _native(weight, bias, self._arena)
            case "onednn":
                return _onednn(weight, bias)
            case _:
                return lambda rows: F.linear(rows, weight, bias)


def padded(num_rows: int) -> int:
    """Pad to at least two rows and to few distinct row counts, because libraries cache code for each count."""
    step = 2 if num_rows <= 8 else 4 if num_rows <= 16 else 8 if num_rows <= 64 else 32
    return max(2, -(-num_rows // step) * step)


def choose_kind(dtype: torch.dtype, device: torch.device) -> LinearKind:
    """Return the fastest product that passes its test, for weights and rows of this dtype."""
    if dtype != torch.float32 or device.type != "cpu":
        return LinearKind("plain", f"weights are packed as float32 on a CPU, these are {dtype} on {device.type}")
    if (complaint := products.probe("float32")) is None:
        return LinearKind("native", "weights packed once for any rows")
    return LinearKind("onednn" if _probe_onednn() is None else "plain", complaint)


@cache
def _probe_onednn() -> str | None:
    counts = tuple({padded(count) for count in products.PROBED_ROWS})

    def prepare(weight: Floats) -> Callable[[Floats], Floats]:
        product = _onednn(torch.from_numpy(weight), None)
        return lambda rows: product(torch.from_numpy(rows)).numpy()

    return products.probed("oneDNN", prepare, products.LIBRARY_SHAPES, counts)


def _native(weight: torch.Tensor, bias: torch.Tensor | None, arena: Arena) -> PackedLinear:
    num_out, num_in = weight.shape
    added = None if bias is None else bias.contiguous().numpy()
    packed = products.PackedProduct([weight.contiguous().numpy()], (num_out, num_in), added, "float32", arena)

    def product(rows: torch.Tensor) -> torch.Tensor:
        # Explicit dtype and device, because torch's defaults may differ and the kernel writes float32.
        out = torch.empty(len(rows), num_out, dtype=torch.float32, device="cpu")
        packed.product(rows.numpy(), out.numpy())
        return out

    return product


def _onednn(weight: torch.Tensor, bias: torch.Tensor | None) -> PackedLinear:
    pack = torch.ops.mkldnn._reorder_linear_weight(weight)
    run = torch.ops.mkldnn._linear_pointwise

    def product(rows: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = run(rows, pack, bias, "none", [], "")
        return out

    return product
