"""The rows of a stored tensor that one matrix product of a decoder uses, and their order."""

from dataclasses import dataclass

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class HeadOrder:
    """Row order of heads with partial or interleaved RoPE; rows are permuted so that all heads rotate alike."""

    num_rotated: int
    is_interleaved: bool


@dataclass(frozen=True, slots=True)
class Matrix:
    """The weight matrix of one product: some rows of a tensor, one row per output."""

    name: str
    shape: Shape
    """Shape of the whole tensor; all dimensions but the last form its rows."""
    num_out: int
    first: int = 0
    step: int = 1  # row i of the product is row first + i * step of the tensor
    is_transposed: bool = False
    """Whether the tensor's rows are inputs and its last dimension contains the outputs."""
    order: HeadOrder | None = None
    head_size: int = 0
    """Size of the heads permuted by `order`."""
    bias: str | None = None
    bias_shape: Shape = ()
    group_stride: int = 0
    """Rows per group of the tensor's rows; of each group, `rows_per_group` rows from `first` are used. 0: no groups."""
    rows_per_group: int = 0
    """Number of rows used from each group."""


def plain_matrix(
    name: str, num_out: int, num_in: int, has_bias: bool, order: HeadOrder | None = None, head_size: int = 0
) -> Matrix:
    """Return a matrix of all rows of a tensor, with its bias."""
    bias, shape = (f"{name}.bias", (num_out,)) if has_bias else (None, ())
    return Matrix(f"{name}.weight", (num_out, num_in), num_out, order=order, head_size=head_size, bias=bias,
                  bias_shape=shape)  # fmt: skip
