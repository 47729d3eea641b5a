"""Only the matrix products of a step, with every available packed operator: the baseline for step times.

    native   quire's own, which the engine uses
    mkl      torch's private operator over MKL, packed for exactly these rows
    onednn   torch's private operator over oneDNN

The last two are here for comparison only: the CPU backend has no torch.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch

from quire.backends.cpu.measured_roof import Bare, Multiply
from quire.backends.kernels.arrays import Floats
from quire.backends.kernels.products import native_product
from quire.backends.torch.linear import LinearKind
from quire.checkpoints.families import DecoderShape

Prepare = Callable[[Floats], Multiply]


def bare_products(
    shape: DecoderShape,
    num_rows: int,
    head_rows: int,
    parts: int = 1,
    names: Sequence[str] = ("native", "mkl", "onednn"),
) -> dict[str, Callable[[], None]]:
    """Return calls that compute the products of all layers for these rows in equal parts, then the head's."""
    by_name: dict[str, tuple[Prepare, Prepare]] = {
        "native": (native_product, native_product),
        "mkl": (partial(_mkl, num_rows // parts), partial(_mkl, head_rows)),
        "onednn": (_onednn, _onednn),
    }
    suffix = "" if parts == 1 else f" in {parts}"
    return {f"{name}{suffix}": Bare(shape, num_rows // parts, head_rows, *by_name[name], parts).run for name in names}


def _onednn(weight: Floats) -> Multiply:
    product = LinearKind("onednn", "").prepare(torch.from_numpy(weight))
    return torch.inference_mode()(lambda rows: product(torch.from_numpy(rows)))


def _mkl(num_rows: int, weight: Floats) -> Multiply:
    pack = torch.ops.mkl._mkl_reorder_linear_weight(torch.from_numpy(weight), num_rows)
    # The operator needs the original only for other row counts than the packed one, so a tensor of its shape suffices.
    shape = torch.empty(1).expand(weight.shape)

    def product(rows: Floats) -> object:
        return torch.ops.mkl._mkl_linear(torch.from_numpy(rows), pack, shape, None, num_rows)

    return torch.inference_mode()(product)
