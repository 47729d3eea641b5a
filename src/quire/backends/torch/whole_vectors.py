"""Makes torch functions give bits that do not depend on an element's position in an array.

torch computes functions such as silu in vectors. The last elements of an array, or of a thread's part of it, that do
not fill a vector are computed one by one with another implementation of exp; which elements these are depends on the
row count. Here the functions receive only whole vectors, and few enough for one thread.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the customary name
from torch.utils._python_dispatch import TorchDispatchMode

VECTOR_LENGTH = 64
"""A multiple of the vector length of any processor."""
PIECE_LENGTH = 1 << 14
"""Numbers per call; torch divides only calls of at least twice this size among threads."""

_ATEN = torch.ops.aten
POSITION_DEPENDENT = frozenset(
    getattr(_ATEN, name)
    for name in (
        "silu", "silu_", "gelu", "gelu_", "sigmoid", "sigmoid_", "softplus", "mish", "mish_", "elu", "elu_", "celu",
        "celu_", "selu", "selu_", "exp2", "exp2_", "pow", "pow_",
    )
)  # fmt: skip
"""Element-wise functions of one array that a decoder may use and whose bits depend on an element's position."""


class WholeVectors(TorchDispatchMode):
    """Dispatch mode in which a number's bits do not depend on its position."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        options = kwargs or {}
        if func.overloadpacket is _ATEN.glu:
            values, gate = args[0].chunk(2, *(args[1:] or (-1,)))
            return values * torch.sigmoid(gate)
        if func.overloadpacket not in POSITION_DEPENDENT or not _is_plain(args, options):
            return func(*args, **options)
        tensor: torch.Tensor = args[0]
        result = _apply_by_pieces(lambda piece: func(piece, *args[1:], **options), tensor)
        return tensor.copy_(result) if func._schema.is_mutable else result


def _is_plain(args: Sequence[Any], options: Mapping[str, Any]) -> bool:
    """Whether the first argument is a CPU array of floats and no other argument is an array."""
    first, rest = args[0], (*args[1:], *options.values())
    return (
        isinstance(first, torch.Tensor)
        and first.is_floating_point()
        and first.device.type == "cpu"
        and not any(isinstance(argument, torch.Tensor) for argument in rest)
    )


def _apply_by_pieces(function: Any, tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.reshape(-1)
    whole = F.pad(flat, (0, -len(flat) % VECTOR_LENGTH))
    result = torch.cat([function(piece.clone()) for piece in torch.split(whole, PIECE_LENGTH)]) if len(flat) else whole
    return result[: len(flat)].view(tensor.shape)
