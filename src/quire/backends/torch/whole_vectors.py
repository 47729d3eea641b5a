"""Makes torch functions give bits that do not depend on an element's position in an array.

torch computes these functions in vectors. The elements left over at the end of an array, or of a thread's part of an
array, are computed one by one with another implementation of exp. Which elements are left over depends on the row
count. Here the functions receive whole vectors only, and few enough for one thread.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - as everyone writes it
from torch.utils._python_dispatch import TorchDispatchMode

VECTOR = 64
"""A multiple of the vector length of any processor."""
PIECE = 1 << 14
"""Numbers per call; torch divides work among threads only from twice this size."""

_ATEN = torch.ops.aten
LEAVE_OVER = frozenset(
    getattr(_ATEN, name)
    for name in (
        "silu", "silu_", "gelu", "gelu_", "sigmoid", "sigmoid_", "softplus", "mish", "mish_", "elu", "elu_", "celu",
        "celu_", "selu", "selu_", "exp2", "exp2_", "pow", "pow_",
    )
)  # fmt: skip
"""Element-wise functions of one array that have left-over elements and that a decoder may use."""


class WholeVectors(TorchDispatchMode):
    """Dispatch mode in which a number's bits do not depend on its position."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        if func.overloadpacket is _ATEN.glu:
            kept, gate = args[0].chunk(2, *(args[1:] or (-1,)))
            return kept * torch.sigmoid(gate)
        if func.overloadpacket not in LEAVE_OVER or not _is_plain(args, named):
            return func(*args, **named)
        tensor: torch.Tensor = args[0]
        made = _by_pieces(lambda piece: func(piece, *args[1:], **named), tensor)
        return tensor.copy_(made) if func._schema.is_mutable else made


def _is_plain(args: Sequence[Any], named: Mapping[str, Any]) -> bool:
    """Whether the arguments are one CPU array of floats, and otherwise only numbers."""
    first, others = args[0], (*args[1:], *named.values())
    return (
        isinstance(first, torch.Tensor)
        and first.is_floating_point()
        and first.device.type == "cpu"
        and not any(isinstance(one, torch.Tensor) for one in others)
    )


def _by_pieces(function: Any, tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.reshape(-1)
    filled = F.pad(flat, (0, -len(flat) % VECTOR))
    made = torch.cat([function(piece.clone()) for piece in torch.split(filled, PIECE)]) if len(flat) else filled
    return made[: len(flat)].view(tensor.shape)
