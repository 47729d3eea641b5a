"""Quantized tensors of safetensors files, by scheme. Unquantized tensors are stored as in GGUF files.

    compressed-tensors  pack-quantized, int4 or int8     AWQ   int4         fp8   e4m3 codes, scales per block,
    GPTQ                int4 or int8, no desc_act                                per output or for the whole tensor

A scheme defines how codes, scales and zero points are stored. Codes are unpacked to one byte each, chunk by chunk.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quire.backends.cpu.formats.source import RowPiece, Source
from quire.backends.cpu.formats.weight_format import FORMATS
from quire.backends.kernels.arrays import Floats
from quire.checkpoints.quantisation import Quantisation
from quire.errors import CheckpointError

Codes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class StoredArray:
    """A mapped tensor with its safetensors dtype name. BF16 is mapped as uint16, F8_E4M3 as uint8."""

    type: str
    array: NDArray[np.generic]

    def floats(self) -> Floats:
        """Return the numbers as float32; used for scales."""
        if self.type == "BF16":
            return (self.array.astype(np.uint32) << 16).view(np.float32)
        if self.type not in {"F16", "F32"}:
            raise CheckpointError(f"expected scales of type BF16, F16 or F32, got {self.type}")
        return self.array.astype(np.float32)


Tensors = Mapping[str, StoredArray]
"""The tensors of one weight, by the last part of their names."""


def compressed_source(tensors: Tensors, options: Quantisation) -> Source:
    """compressed-tensors, pack-quantized: 32-bit integers of one output's consecutive inputs, lowest bits first."""
    num_out, num_in = (int(size) for size in np.ravel(tensors["weight_shape"].array))
    _check_group_order(tensors.get("weight_g_idx"), options)
    packed = np.ascontiguousarray(tensors["weight_packed"].array)
    scales = tensors["weight_scale"].floats().reshape(num_out, -1)
    zeros = np.full(scales.shape, 1 << (options.num_bits - 1), dtype=np.uint8)
    if not options.is_symmetric:
        words = np.ascontiguousarray(tensors["weight_zero_point"].array.T)
        zeros = np.ascontiguousarray(_unpack_words(words, options.num_bits)[:, :num_out].T)
    return _code_source(
        num_out,
        num_in,
        lambda first, end: _unpack_words(packed[first:end], options.num_bits)[:, :num_in],
        scales,
        zeros,
        options,
    )


def gptq_source(tensors: Tensors, options: Quantisation) -> Source:
    """GPTQ: each 32-bit integer packs consecutive inputs of one output, [in / codes per integer, out]."""
    words = tensors["qweight"].array
    num_out, num_in = words.shape[1], words.shape[0] * (32 // options.num_bits)
    _check_group_order(tensors.get("g_idx"), options)
    zeros = _unpack_words(np.ascontiguousarray(tensors["qzeros"].array), options.num_bits)[:, :num_out]
    return _code_source(
        num_out,
        num_in,
        lambda first, end: _unpack_words(np.ascontiguousarray(words[:, first:end].T), options.num_bits),
        np.ascontiguousarray(tensors["scales"].floats().T),
        np.ascontiguousarray((zeros + np.uint8(options.zeros_are_less_one)).T),
        options,
    )


AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""For each 4-bit code of a 32-bit integer, lowest bits first: its index among 8 consecutive outputs."""


def awq_source(tensors: Tensors, options: Quantisation) -> Source:
    """AWQ: each 32-bit integer packs 8 consecutive outputs in AWQ_ORDER, [in, out / 8]."""
    if options.num_bits != 4:
        raise CheckpointError(f"expected AWQ weights of 4 bits, got {options.num_bits}", code="wrong_num_bits")
    words = tensors["qweight"].array
    num_in, num_out = words.shape[0], words.shape[1] * 8

    def unpack(first: int, end: int) -> Codes:
        begin, last = first // 8, -(-end // 8)
        return np.ascontiguousarray(_unpack_in_order(words[:, begin:last])[:, : end - first].T)

    return _code_source(
        num_out,
        num_in,
        unpack,
        np.ascontiguousarray(tensors["scales"].floats().T),
        np.ascontiguousarray(_unpack_in_order(tensors["qzeros"].array).T),
        options,
    )


def fp8_source(tensors: Tensors, options: Quantisation) -> Source:
    """fp8: e4m3 numbers with scales per block, per output or for the whole tensor."""
    rows = np.ascontiguousarray(tensors["weight"].array).view(np.uint8)
    num_out, num_in = rows.shape
    group = options.group_size or num_in
    has_block_scales = "weight_scale_inv" in tensors
    stored_scales = tensors["weight_scale_inv" if has_block_scales else "weight_scale"].floats()
    scales = np.atleast_1d(stored_scales).reshape(len(np.atleast_1d(stored_scales)), -1)
    if len(scales) != num_out:
        # One row of scales applies to a block of outputs, or to all outputs.
        outputs_per_scale = group if has_block_scales else num_out
        scales = np.repeat(scales, outputs_per_scale, axis=0)[:num_out]
    if scales.shape != (num_out, -(-num_in // group)):
        raise CheckpointError(
            f"expected scales for a weight [{num_out}, {num_in}] with groups of {group}, got {stored_scales.shape}; "
            "the files belong to different models"
        )
    return Source(
        FORMATS["FP8_E4M3"],
        num_out,
        num_in,
        lambda first, end: RowPiece(rows[first:end], scales[first:end]),
        group,
    )


SCHEMES: Mapping[str, Callable[[Tensors, Quantisation], Source]] = {
    "pack-quantized": compressed_source,
    "gptq": gptq_source,
    "awq": awq_source,
    "fp8": fp8_source,
}
"""Scheme name in a model's quantization config -> source function."""


def _code_source(
    num_out: int, num_in: int, unpack: Callable[[int, int], Codes], scales: Floats, zeros: Codes, options: Quantisation
) -> Source:
    """Return a source of codes. `unpack` returns outputs [first, end); scales and zero points are [out, group]."""
    group = options.group_size or num_in
    expected_shape = (num_out, -(-num_in // group))
    if scales.shape != expected_shape or zeros.shape != expected_shape:
        raise CheckpointError(
            f"weight [{num_out}, {num_in}] with groups of {group}: expected scales and zeros {expected_shape}, got "
            f"{scales.shape} and {zeros.shape}; the files belong to different models",
            code="wrong_scales",
        )

    def read(first: int, end: int) -> RowPiece:
        return RowPiece(unpack(first, end), scales[first:end], zeros[first:end])

    return Source(FORMATS[f"INT{options.num_bits}"], num_out, num_in, read, group)


def _unpack_words(words: NDArray[np.generic], num_bits: int) -> Codes:
    """Unpack 32-bit integers [row, integer] into codes [row, code], lowest bits first."""
    as_bytes = words.view(np.uint8)
    if num_bits == 8:
        return as_bytes
    if num_bits != 4:
        raise CheckpointError(f"expected codes of 4 or 8 bits, got {num_bits}; choose the model in another format")
    codes = np.empty((len(as_bytes), as_bytes.shape[1], 2), dtype=np.uint8)
    np.bitwise_and(as_bytes, 15, out=codes[..., 0])
    np.right_shift(as_bytes, 4, out=codes[..., 1])
    return codes.reshape(len(as_bytes), -1)


def _unpack_in_order(words: NDArray[np.generic]) -> Codes:
    """Unpack AWQ's integers [row, integer] into codes in the order of outputs."""
    codes = _unpack_words(np.ascontiguousarray(words), 4).reshape(len(words), -1, 8)
    ordered = np.empty_like(codes)
    ordered[..., AWQ_ORDER] = codes
    return ordered.reshape(len(words), -1)


def _check_group_order(indices: StoredArray | None, options: Quantisation) -> None:
    """Raise CheckpointError unless each group consists of consecutive inputs."""
    if indices is None:
        return
    groups = np.ravel(indices.array)
    if (groups >= 0).all() and (groups != np.arange(len(groups)) // (options.group_size or len(groups))).any():
        raise CheckpointError(
            "expected groups of neighbouring inputs in a quantised weight, got another order (desc_act); choose a "
            "model quantised without desc_act",
            code="groups_in_other_order",
        )
