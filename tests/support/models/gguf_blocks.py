"""Blocks of GGUF types with any codes and plausible scales, their numbers by the `gguf` package, and their products."""

import gguf
import numpy as np
from gguf import quants
from numpy.typing import NDArray

from quire.backends.cpu.formats.packed_weight import PackedWeight
from quire.backends.cpu.formats.weight_format import Arithmetic
from quire.backends.kernels.arrays import rows_of
from quire.backends.kernels.extension import kernels

PLAIN = ("F32", "F16", "BF16")
SCALES_AT = {
    "Q8_0": (0,),
    "Q4_0": (0,),
    "Q5_0": (0,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
    "Q4_1": (0, 2),
    "Q5_1": (0, 2),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "MXFP4": (),
    "IQ3_S": (0,),
    "TQ2_0": (64,),
}
"""Where a block has numbers in fp16."""


def random_rows(name: str, num_out: int, num_in: int, dice: np.random.Generator) -> NDArray[np.uint8]:
    """[out, bytes of a row]."""
    kind = gguf.GGMLQuantizationType[name]
    if name in PLAIN:
        numbers = dice.standard_normal((num_out, num_in)).astype(np.float32)
        return quants.quantize(numbers, kind).view(np.uint8).reshape(num_out, -1)
    size, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    blocks = dice.integers(0, 256, (num_out, num_in // size, num_bytes), dtype=np.uint8)
    for at in SCALES_AT[name]:
        scales = dice.uniform(1e-3, 2e-2, blocks.shape[:2]) * dice.choice([-1, 1], blocks.shape[:2])
        blocks[..., at : at + 2] = scales.astype(np.float16)[..., None].view(np.uint8)
    if name == "MXFP4":
        blocks[..., 0] = dice.integers(110, 130, blocks.shape[:2])
    return blocks.reshape(num_out, -1)


def dequantize(name: str, rows: NDArray[np.uint8]) -> NDArray[np.float32]:
    """As the `gguf` package reads them."""
    read: NDArray[np.float32] = quants.dequantize(rows, gguf.GGMLQuantizationType[name])
    return read.reshape(len(rows), -1)


def panel_product(
    weight: PackedWeight, rows: NDArray[np.float32], arithmetic: Arithmetic, num_threads: int = 1
) -> NDArray[np.float32]:
    """[row, out] = `rows` [row, in] x weight^T + bias. Rows may lie anywhere, each is contiguous."""
    assert arithmetic in weight.format.arithmetics
    out = np.full((len(rows), weight.num_out), np.nan, np.float32)
    head = (weight.format.native_id, weight.num_out, weight.num_in, weight.group, *weight.addresses)
    places = (*rows_of(rows, np.float32, weight.num_in), *rows_of(out, np.float32))
    kernels().panel_product(*head, int(arithmetic), num_threads, *places, len(rows))
    return out
