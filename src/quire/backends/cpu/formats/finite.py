"""Whether a piece of a weight stands for finite numbers: a file that holds others is refused as it is read.

Codes are small whole numbers, so of a coded format only its scales can be wrong.
"""

import numpy as np
from numpy.typing import NDArray

from quire.backends.cpu.formats.source import RowPiece
from quire.backends.cpu.formats.weight_format import WeightFormat

EXPONENTS = {"F32": ("<u4", 0x7F800000), "F16": ("<u2", 0x7C00), "BF16": ("<u2", 0x7F80)}
"""Of plain numbers: the bits that are all ones in what is not finite."""
HALVES_AT = {
    "Q8_0": (0,), "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2),
    "Q6_K": (208,), "IQ4_NL": (0,), "IQ4_XS": (0,),
}  # fmt: skip
"""Where a block has its scales, in fp16."""
LARGEST_POWER = 252
"""Of MXFP4: six times two to the power of 252 - 127 is the largest that float32 holds."""


def is_finite(made: WeightFormat, piece: RowPiece) -> bool:
    """Whether all numbers of the piece are."""
    if piece.scales is not None and not np.isfinite(piece.scales).all():
        return False
    if made.name in EXPONENTS:
        return _has_no(piece.rows, *EXPONENTS[made.name])
    if made.name == "MXFP4":
        return int(_blocks(made, piece)[:, 0].max(initial=0)) <= LARGEST_POWER
    if made.name == "FP8_E4M3":
        return _has_no(piece.rows, "u1", 0x7F)
    blocks = _blocks(made, piece) if made.name in HALVES_AT else None
    return blocks is None or all(_has_no(blocks[:, at : at + 2], *EXPONENTS["F16"]) for at in HALVES_AT[made.name])


def _blocks(made: WeightFormat, piece: RowPiece) -> NDArray[np.uint8]:
    return piece.rows.reshape(-1, made.block_bytes)


def _has_no(rows: NDArray[np.uint8], kind: str, ones: int) -> bool:
    bits = rows.view(kind)
    return int((bits & bits.dtype.type(ones)).max(initial=0)) < ones
