"""Which rows of which tensor a product takes, and in which order."""

from dataclasses import dataclass

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class HeadOrder:
    """Rows of heads that turn in part, or neighbour with neighbour: where each row goes so that all turn alike."""

    num_rotated: int
    is_interleaved: bool


@dataclass(frozen=True, slots=True)
class Matrix:
    """Outputs of a product: rows of a tensor."""

    name: str
    shape: Shape
    """Of the whole tensor; its rows are all dimensions but the last."""
    num_out: int
    first: int = 0
    step: int = 1
    is_transposed: bool = False
    """The rows are inputs: the last dimension has the outputs."""
    order: HeadOrder | None = None
    head_size: int = 0
    """Of the heads that `order` is about."""
    bias: str | None = None
    bias_shape: Shape = ()
    every: int = 0
    """Rows come in groups of so many, of which a few are taken, from `first` on; 0: all are one group."""
    each: int = 0
    """How many of every group."""


def plain_matrix(
    name: str, num_out: int, num_in: int, has_bias: bool, order: HeadOrder | None = None, head_size: int = 0
) -> Matrix:
    """A tensor whose rows are all taken, and its bias."""
    bias, shape = (f"{name}.bias", (num_out,)) if has_bias else (None, ())
    return Matrix(f"{name}.weight", (num_out, num_in), num_out, order=order, head_size=head_size, bias=bias,
                  bias_shape=shape)  # fmt: skip
