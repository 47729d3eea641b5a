"""Matrix products with weights packed once. The only file that knows the private operators of the packed paths.

`F.linear` gives a row other bits in other company and wastes much of a batched step. Two packed operators do neither,
from two rows up; which is used is one decision per process, because their bits differ from each other:

    MKL      the fastest, but each number of rows has its own copy of the weights: a few **buckets**, and padding
    oneDNN   one copy for any number of rows, 1.1 to 1.4 times slower

So more memory buys more buckets (`choose_kind`), and rows are padded to what is computed anyway. What a library does is
asked, not assumed: each operator is probed on this machine, and if one is missing, wrong or not row-invariant the next
is taken, with a reason. The original weights are not kept.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import accumulate

import torch
import torch.nn.functional as F  # noqa: N812 - as everyone writes it

from quire.backends.torch.buckets import BUCKET_CHOICES, choose_buckets, cut

Product = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class LinearKind:
    """How products are made, and why."""

    name: str
    """`mkl`, `onednn` or `plain`."""
    reason: str
    buckets: tuple[int, ...] = ()

    @property
    def is_packed(self) -> bool:
        """Whether a row's bits depend on that row alone."""
        return self.name != "plain"

    @property
    def num_copies(self) -> int:
        """How often the weights are held."""
        return max(1, len(self.buckets))

    def cuts(self, num_rows: int) -> tuple[int, ...]:
        """The row counts of the calls that compute this many, largest first."""
        return cut(self.buckets, num_rows) if self.buckets else (padded(num_rows),)

    def slabs(self, num_rows: int) -> list[slice]:
        """How this many padded rows are best cut for a chain of products: no part larger than one call takes."""
        ends = list(accumulate(self.cuts(num_rows)))
        return [slice(first, end) for first, end in zip([0, *ends], ends, strict=False)]

    def padded(self, num_rows: int) -> int:
        """The row count that is computed for this many: at least 2, and few different ones."""
        return sum(self.cuts(num_rows))

    def prepare(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Product:
        """A product with this weight ([out, in]) for rows padded by `padded`."""
        match self.name:
            case "mkl":
                return _mkl(weight, bias, self.buckets)
            case "onednn":
                return _onednn(weight, bias)
            case _:
                return lambda rows: F.linear(rows, weight, bias)


def padded(num_rows: int) -> int:
    """Rows where any number will do: few different ones, because libraries keep code for each they meet."""
    step = 2 if num_rows <= 8 else 4 if num_rows <= 16 else 8 if num_rows <= 64 else 32
    return max(2, -(-num_rows // step) * step)


def choose_kind(
    dtype: torch.dtype, device: torch.device, weight_bytes: int, budget_bytes: int, max_rows: int
) -> LinearKind:
    """The fastest way that is known to be right and fits, for steps of at most so many rows."""
    if dtype != torch.float32 or device.type != "cpu":
        return LinearKind("plain", f"weights are packed for float32 on a CPU only, this is {dtype} on {device.type}")
    buckets = choose_buckets(weight_bytes, budget_bytes, max_rows)
    if buckets and (complaint := _probe_mkl()) is None:
        return LinearKind("mkl", f"weights packed for {', '.join(map(str, buckets))} rows", buckets)
    complaint = _probe_onednn()
    return LinearKind("plain", complaint) if complaint else LinearKind("onednn", "weights packed once for any rows")


@cache
def _probe_mkl() -> str | None:
    buckets = BUCKET_CHOICES[0]
    return _probed("MKL", lambda weight: LinearKind("mkl", "", buckets).prepare(weight), buckets)


@cache
def _probe_onednn() -> str | None:
    return _probed("oneDNN", lambda weight: _onednn(weight, None), (2, 4, 8, 16, 40, 64, 96))


def _probed(name: str, prepare: Callable[[torch.Tensor], Product], counts: tuple[int, ...]) -> str | None:
    """None if the operator runs, is right, and gives a row the same bits in every company; else what is wrong."""
    generator = torch.Generator().manual_seed(1)
    for num_in, num_out in ((64, 96), (576, 1536), (1536, 576), (33, 65)):
        weight = torch.randn(num_out, num_in, generator=generator) / num_in**0.5
        rows = torch.randn(256, num_in, generator=generator)
        try:
            product = prepare(weight)
            whole = product(rows)
        except (AttributeError, RuntimeError) as error:
            return f"the packed operator of {name} does not run here ({type(error).__name__})"
        if not torch.allclose(whole, F.linear(rows, weight), atol=1e-4, rtol=1e-4):
            return f"the packed operator of {name} disagrees with F.linear here"
        places = ((first, n) for n in counts for first in {0, min(5, len(rows) - n), len(rows) - n})
        if any(not torch.equal(product(rows[first : first + n]), whole[first : first + n]) for first, n in places):
            return f"the packed operator of {name} is not row-invariant here"
    return None


def _mkl(weight: torch.Tensor, bias: torch.Tensor | None, buckets: tuple[int, ...]) -> Product:
    packs = {size: torch.ops.mkl._mkl_reorder_linear_weight(weight, size) for size in buckets}
    run = torch.ops.mkl._mkl_linear
    # The operator wants the original for row counts it was not packed for; it gets its shape and never its numbers.
    shape = torch.empty(1).expand(weight.shape)

    def product(rows: torch.Tensor) -> torch.Tensor:
        count = len(rows)
        if count in packs:
            out: torch.Tensor = run(rows, packs[count], shape, bias, count)
            return out
        parts = torch.tensor_split(rows, list(accumulate(cut(buckets, count)))[:-1])
        return torch.cat([run(part, packs[len(part)], shape, bias, len(part)) for part in parts])

    return product


def _onednn(weight: torch.Tensor, bias: torch.Tensor | None) -> Product:
    pack = torch.ops.mkldnn._reorder_linear_weight(weight)
    run = torch.ops.mkldnn._linear_pointwise

    def product(rows: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = run(rows, pack, bias, "none", [], "")
        return out

    return product
