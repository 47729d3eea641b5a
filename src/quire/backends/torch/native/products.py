"""Products with packed weights, and what is read off their results."""

import torch

from quire.backends.torch.large_pages import Arena
from quire.backends.torch.native import extension
from quire.backends.torch.native.tensors import address_of, check_dense, check_floats, layout

WEIGHT_TYPES = {torch.float32: 0, torch.bfloat16: 1}


class PackedProduct:
    """Rows times a weight [out, in], plus a bias: the weight is packed once and held in one copy, for any rows.

    It is held as float32 or rounded to bfloat16; rows and results are float32. A row's result is the same in any
    company and with any number of threads.
    """

    __slots__ = ("_bias", "_call", "_head", "_num_in", "_num_out", "_packed")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype, arena: Arena) -> None:
        weight = weight.contiguous()
        check_floats(weight)
        if dtype not in WEIGHT_TYPES:
            raise TypeError(f"weights are packed as float32 or bfloat16, not as {dtype}")
        self._num_out, self._num_in = weight.shape
        kernels, sizes, num_threads = extension.kernels(), (self._num_out, self._num_in), torch.get_num_threads()
        self._packed = arena.take(kernels.packed_bytes(WEIGHT_TYPES[dtype], *sizes))
        self._bias = None if bias is None else bias.contiguous()
        kernels.pack(WEIGHT_TYPES[dtype], weight.data_ptr(), *sizes, self._packed.data_ptr(), num_threads)
        bias_at = 0 if self._bias is None else address_of(self._bias, (self._num_out,))
        self._call = kernels.product
        self._head = (WEIGHT_TYPES[dtype], self._packed.data_ptr(), bias_at, self._num_in, self._num_out)

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """[row, out], for rows that lie anywhere as long as each is contiguous."""
        is_dense = rows.dim() == 2 and rows.shape[1] == self._num_in and rows.stride(1) == 1
        if not is_dense or rows.dtype != torch.float32 or rows.device.type != "cpu":
            raise ValueError(
                f"rows must be float32, {self._num_in} contiguous numbers each: {layout(rows)} on {rows.device} given"
            )
        num_rows = len(rows)
        # Whatever the caller's process has made torch's defaults: the kernel writes floats into it.
        out = torch.empty(num_rows, self._num_out, dtype=torch.float32, device="cpu")
        self._call(
            *self._head,
            torch.get_num_threads(),
            rows.data_ptr(),
            rows.stride(0),
            out.data_ptr(),
            self._num_out,
            num_rows,
        )
        return out


def has_tiles() -> bool:
    """Whether products with bfloat16 weights are made in tile registers here."""
    has: bool = extension.kernels().has_tiles()
    return has


def argmax(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The first index of each row's largest number, and whether all numbers of the row are finite."""
    check_floats(logits)
    num_rows, size = logits.shape
    if size == 0 or logits.stride(1) != 1:
        raise ValueError(f"logits are {layout(logits)}: rows must be contiguous and not empty")
    indices = torch.empty(num_rows, dtype=torch.int64)
    is_finite = torch.empty(num_rows, dtype=torch.bool)
    extension.kernels().argmax(
        logits.data_ptr(),
        logits.stride(0),
        indices.data_ptr(),
        is_finite.data_ptr(),
        num_rows,
        size,
        torch.get_num_threads(),
    )
    return indices, is_finite


def exp(numbers: torch.Tensor) -> torch.Tensor:
    """The kernels' own exp, right up to 88: for tests."""
    check_floats(numbers)
    check_dense(numbers)
    out = torch.empty_like(numbers)
    extension.kernels().exp(numbers.data_ptr(), out.data_ptr(), numbers.numel())
    return out


def read_sum(data: torch.Tensor, num_threads: int | None = None) -> float:
    """Read all of `data` as fast as this machine can: the roof of everything that is bound by memory."""
    check_dense(data)
    num_bytes = data.numel() * data.itemsize
    total: float = extension.kernels().read_sum(data.data_ptr(), num_bytes, num_threads or torch.get_num_threads())
    return total
