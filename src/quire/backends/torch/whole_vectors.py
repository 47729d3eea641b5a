"""Functions of torch that give the last few numbers of an array other bits, made to give all of them the same.

torch computes these a vector at a time, and what is left over at the end of an array, or of a thread's part of it, one
by one with another exp. Which numbers are left over depends on how many rows there are. So here such a function sees
whole vectors only, and few enough that one thread does them all.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - as everyone writes it
from torch.utils._python_dispatch import TorchDispatchMode

VECTOR = 64
"""A multiple of what any processor computes at once."""
PIECE = 1 << 14
"""Numbers; torch shares out no fewer than twice as many."""

_ATEN = torch.ops.aten
LEAVE_OVER = frozenset(
    getattr(_ATEN, name)
    for name in (
        "silu", "silu_", "gelu", "gelu_", "sigmoid", "sigmoid_", "softplus", "mish", "mish_", "elu", "elu_", "celu",
        "celu_", "selu", "selu_", "exp2", "exp2_", "pow", "pow_",
    )
)  # fmt: skip
"""Element by element, one array in: those that do so and a decoder may use."""


class WholeVectors(TorchDispatchMode):
    """While it is entered, a number's bits do not depend on where it stands."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """`func`, in pieces if it must be."""
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
    """One array of floats on the CPU, and numbers."""
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
