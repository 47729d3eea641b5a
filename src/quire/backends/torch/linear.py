"""Matrix products with weights packed once. The only file that knows the private operators of the packed path.

`F.linear` gives a row other bits in other company and wastes much of a batched step; weights reordered once for oneDNN
do neither, from two rows up. So a row alone is padded to two, and row counts are rounded up to few sizes (`padded`),
because the library prepares and keeps code for every size it meets.

What a library does is asked, not assumed: `choose_kind` probes the packed operator on this machine, and falls back to
`F.linear` with a reason if it is missing, wrong, or not row-invariant.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F  # noqa: N812 - as everyone writes it

Product = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class LinearKind:
    """How products are made, and why not the better way if it is not."""

    is_packed: bool
    reason: str

    def prepare(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Product:
        """A product with this weight ([out, in]). Packed weights do not keep the original alive."""
        return _packed(weight, bias) if self.is_packed else _plain(weight, bias)


def padded(num_rows: int) -> int:
    """The row count that is computed for this many: at least 2, and few different ones."""
    step = 2 if num_rows <= 8 else 4 if num_rows <= 16 else 8 if num_rows <= 64 else 32
    return max(2, -(-num_rows // step) * step)


def choose_kind(dtype: torch.dtype, device: torch.device) -> LinearKind:
    """The packed way where it is known to be right."""
    if dtype != torch.float32 or device.type != "cpu":
        return LinearKind(False, f"weights are packed for float32 on a CPU only, this is {dtype} on {device.type}")
    return _probed()


@cache
def _probed() -> LinearKind:
    generator = torch.Generator().manual_seed(1)
    for num_in, num_out in ((64, 96), (576, 1536), (1536, 576), (33, 65)):
        weight = torch.randn(num_out, num_in, generator=generator) / num_in**0.5
        rows = torch.randn(128, num_in, generator=generator)
        try:
            product = _packed(weight, None)
            whole = product(rows)
        except (AttributeError, RuntimeError) as error:
            return LinearKind(False, f"the packed operator does not run here ({type(error).__name__})")
        if not torch.allclose(whole, F.linear(rows, weight), atol=1e-4, rtol=1e-4):
            return LinearKind(False, "the packed operator disagrees with F.linear here")
        if any(not torch.equal(product(rows[5 : 5 + n]), whole[5 : 5 + n]) for n in (2, 4, 8, 16, 40, 64, 96)):
            return LinearKind(False, "the packed operator is not row-invariant here")
    return LinearKind(True, "weights packed for oneDNN")


def _packed(weight: torch.Tensor, bias: torch.Tensor | None) -> Product:
    pack = torch.ops.mkldnn._reorder_linear_weight(weight)
    run = torch.ops.mkldnn._linear_pointwise

    def product(rows: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = run(rows, pack, bias, "none", [], "")
        return out

    return product


def _plain(weight: torch.Tensor, bias: torch.Tensor | None) -> Product:
    return lambda rows: F.linear(rows, weight, bias)
