"""Matrix products with weights packed once. The only file that knows how, and the private operator of the second way.

`F.linear` gives a row other bits in other company and wastes much of a batched step. Two packed products do neither;
which is used is one decision per process, because their bits differ from each other:

    native   quire's own: one copy for any number of rows, none of them padding; the fastest up to a hundred rows and as
             fast as any above; weights in float32 or bfloat16
    oneDNN   where there was no compiler: one copy, from two rows up, a few different counts of them; float32 only

What is used is asked, not assumed: each is probed on this machine, and if one is missing, wrong or not row-invariant
the next is taken, with a reason. The original weights are not kept.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache

import torch
import torch.nn.functional as F  # noqa: N812 - as everyone writes it

from quire.backends.torch import native
from quire.backends.torch.large_pages import Arena

PackedLinear = Callable[[torch.Tensor], torch.Tensor]

CHUNK_ROWS = 256
"""Rows that a chain of products takes at once: what one makes is still in the cache when the next reads it."""
PROBED_ROWS = (1, 2, 4, 8, 15, 16, 40, 64, 96)


@dataclass(frozen=True, slots=True)
class LinearKind:
    """How products are made, and why."""

    name: str
    """`native`, `onednn` or `plain`."""
    reason: str
    dtype: torch.dtype = torch.float32
    """How weights are held."""
    _arena: Arena = field(default_factory=Arena, compare=False, repr=False)

    @property
    def is_packed(self) -> bool:
        """Whether a row's bits depend on that row alone."""
        return self.name != "plain"

    @property
    def row_dtype(self) -> torch.dtype:
        """The type of the rows that go in and come out."""
        return torch.float32 if self.is_packed else self.dtype

    def row_chunks(self, num_rows: int) -> list[slice]:
        """How this many padded rows are best cut for a chain of products."""
        size = CHUNK_ROWS if self.name == "native" else num_rows
        return [slice(first, min(first + size, num_rows)) for first in range(0, num_rows, size)]

    def padded(self, num_rows: int) -> int:
        """The row count that is computed for this many."""
        return num_rows if self.name == "native" else padded(num_rows)

    def prepare(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> PackedLinear:
        """A product with this weight ([out, in], in the rows' type) for rows padded by `padded`."""
        match self.name:
            case "native":
                return native.PackedProduct(weight, bias, self.dtype, self._arena)
            case "onednn":
                return _onednn(weight, bias)
            case _:
                return lambda rows: F.linear(rows, weight, bias)


def padded(num_rows: int) -> int:
    """Two rows at least, and few different counts, because libraries keep code for each they meet."""
    step = 2 if num_rows <= 8 else 4 if num_rows <= 16 else 8 if num_rows <= 64 else 32
    return max(2, -(-num_rows // step) * step)


def choose_kind(dtype: torch.dtype, rows: torch.dtype, device: torch.device) -> LinearKind:
    """The fastest way that is known to be right, for weights held in `dtype` and rows of the other type."""
    if rows != torch.float32 or device.type != "cpu" or dtype not in native.WEIGHT_TYPES:
        return LinearKind("plain", f"rows are multiplied as float32 on a CPU, these are {rows} on {device.type}", dtype)
    if (complaint := _probe_native(dtype)) is None:
        return LinearKind("native", "weights packed once for any rows", dtype)
    if dtype == torch.float32 and _probe_onednn() is None:
        return LinearKind("onednn", complaint)
    return LinearKind("plain", complaint, dtype)


@cache
def _probe_native(dtype: torch.dtype) -> str | None:
    found = native.available()
    if not found.is_available:
        return f"no native kernels: {found.reason}"
    kind = LinearKind("native", "", dtype)
    return _probed("quire", kind.prepare, PROBED_ROWS, dtype)


@cache
def _probe_onednn() -> str | None:
    return _probed("oneDNN", lambda weight: _onednn(weight, None), tuple({padded(count) for count in PROBED_ROWS}))


def _probed(
    name: str,
    prepare: Callable[[torch.Tensor], PackedLinear],
    counts: tuple[int, ...],
    dtype: torch.dtype = torch.float32,
) -> str | None:
    """None if the product runs, is right, and gives a row the same bits in every company; else what is wrong."""
    generator = torch.Generator().manual_seed(1)
    for num_in, num_out in ((64, 96), (576, 1536), (1536, 576), (33, 65)):
        # Numbers that the weights' type holds exactly, so that what it is held in is not an error.
        weight = (torch.randn(num_out, num_in, generator=generator) / num_in**0.5).to(dtype).float()
        rows = torch.randn(256, num_in, generator=generator).to(dtype).float()
        try:
            product = prepare(weight)
            whole = product(rows)
        except (AttributeError, RuntimeError) as error:
            return f"the packed product of {name} does not run here ({type(error).__name__})"
        if not torch.allclose(whole, F.linear(rows, weight), atol=1e-4, rtol=1e-4):
            return f"the packed product of {name} disagrees with F.linear here"
        places = ((first, n) for n in counts for first in {0, min(5, len(rows) - n), len(rows) - n})
        if any(not torch.equal(product(rows[first : first + n]), whole[first : first + n]) for first, n in places):
            return f"the packed product of {name} is not row-invariant here"
    return None


def _onednn(weight: torch.Tensor, bias: torch.Tensor | None) -> PackedLinear:
    pack = torch.ops.mkldnn._reorder_linear_weight(weight)
    run = torch.ops.mkldnn._linear_pointwise

    def product(rows: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = run(rows, pack, bias, "none", [], "")
        return out

    return product
