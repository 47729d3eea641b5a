"""The rows of a tensor that a product uses, and their order."""

from dataclasses import dataclass

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class HeadOrder:
    """Row order of heads with partial or interleaved RoPE; rows are permuted so that all heads rotate alike."""

    num_rotated: int
    is_interleaved: bool


@dataclass(frozen=True, slots=True)
class Matrix:
    """The outputs of a product: rows of a tensor."""

    name: str
    shape: Shape
    """Shape of the whole tensor; all dimensions but the last form its rows."""
    num_out: int
    first: int = 0
    step: int = 1
    is_transposed: bool = False
    """The rows are inputs; the last dimension contains the outputs."""
    order: HeadOrder | None = None
    head_size: int = 0
    """Size of the heads permuted by `order`."""
    bias: str | None = None
    bias_shape: Shape = ()
    every: int = 0
    """Size of row groups; the first `each` rows after `first` of every group are used. 0: no groups."""
    each: int = 0
    """Number of rows used from each group."""


def plain_matrix(
    name: str, num_out: int, num_in: int, has_bias: bool, order: HeadOrder | None = None, head_size: int = 0
) -> Matrix:
    """Return a matrix of all rows of a tensor, with its bias."""
    bias, shape = (f"{name}.bias", (num_out,)) if has_bias else (None, ())
    return Matrix(f"{name}.weight", (num_out, num_in), num_out, order=order, head_size=head_size, bias=bias,
                  bias_shape=shape)  # fmt: skip
