"""The products of a step and nothing else, by every packed operator there is: what a step is measured against.

    native   quire's own, which the engine uses
    mkl      torch's private operator over MKL, packed for exactly these rows
    onednn   torch's private operator over oneDNN

The second is here for comparison only: the engine has no use for it.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch

from quire.backends.torch.linear import LinearKind, PackedLinear
from quire.backends.torch.measured_roof import Bare
from quire.backends.torch.models.decoder_config import DecoderShape

Prepare = Callable[[torch.Tensor], PackedLinear]


def bare_products(
    shape: DecoderShape,
    num_rows: int,
    head_rows: int,
    parts: int = 1,
    names: Sequence[str] = ("native", "mkl", "onednn"),
) -> dict[str, Callable[[], None]]:
    """Calls that make them: all layers for these rows in so many equal parts, then the head of some rows."""
    native, onednn = (LinearKind(name, "").prepare for name in ("native", "onednn"))
    by_name: dict[str, tuple[Prepare, Prepare]] = {
        "native": (native, native),
        "mkl": (partial(_mkl, num_rows // parts), partial(_mkl, head_rows)),
        "onednn": (onednn, onednn),
    }
    told = "" if parts == 1 else f" in {parts}"
    return {f"{name}{told}": Bare(shape, num_rows // parts, head_rows, *by_name[name], parts).run for name in names}


def _mkl(num_rows: int, weight: torch.Tensor) -> PackedLinear:
    pack = torch.ops.mkl._mkl_reorder_linear_weight(weight, num_rows)
    # The operator wants the original for row counts it was not packed for; it gets its shape and never its numbers.
    shape = torch.empty(1).expand(weight.shape)

    def product(rows: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = torch.ops.mkl._mkl_linear(rows, pack, shape, None, num_rows)
        return out

    return product
