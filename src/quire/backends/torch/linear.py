"""Matrix products with weights packed once. The only file that knows how, and the private operator of the second way.

`F.linear` gives a row other bits in other company. Two packed products do not; which is used is one decision per
process, because their bits differ from each other:

    native   quire's own: one copy for any number of rows, none of them padding
    oneDNN   where there was no compiler: one copy, from two rows up, a few different counts of them

What is used is asked, not assumed: each is probed on this machine, and if one is missing, wrong or not row-invariant
the next is taken, with a reason. The original weights are not kept.
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
    """How products are made, and why."""

    name: str
    """`native`, `onednn` or `plain`."""
    reason: str
    _arena: Arena = field(default_factory=Arena, compare=False, repr=False)

    @property
    def is_packed(self) -> bool:
        """Whether a row's bits depend on that row alone."""
        return self.name != "plain"

    def padded(self, num_rows: int) -> int:
        """The row count that is computed for this many."""
        return num_rows if self.name == "native" else padded(num_rows)

    def prepare(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> PackedLinear:
        """A product with this weight ([out, in], in the rows' type) for rows padded by `padded`."""
        match self.name:
            case "native":
                return _native(weight, bias, self._arena)
            case "onednn":
                return _onednn(weight, bias)
            case _:
                return lambda rows: F.linear(rows, weight, bias)


def padded(num_rows: int) -> int:
    """Two rows at least, and few different counts, because libraries keep code for each they meet."""
    step = 2 if num_rows <= 8 else 4 if num_rows <= 16 else 8 if num_rows <= 64 else 32
    return max(2, -(-num_rows // step) * step)


def choose_kind(dtype: torch.dtype, device: torch.device) -> LinearKind:
    """The fastest way that is known to be right, for weights and rows of this type."""
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
        # Whatever the caller's process has made torch's defaults: the kernel writes floats into it.
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
