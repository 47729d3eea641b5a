"""Tensors of GGUF files: types that have kernels stay as they are, others are converted to 8 bits, with a warning."""

import logging
from functools import cache
from typing import Any

from quire.backends.cpu.formats.source import RowPiece, Rows, Source
from quire.backends.cpu.formats.weight_format import FORMATS
from quire.errors import CheckpointError

LOG = logging.getLogger("quire.backends")

GGUF_NAMES = frozenset(name for name, weight_format in FORMATS.items() if not weight_format.has_group)
"""GGUF types that have kernels."""
FALLBACK_FORMAT = FORMATS["Q8_0"]


def gguf_source(type_name: str, rows: Rows, num_in: int) -> Source:
    """Return a tensor as a source; `rows` contains its bytes, [out, bytes per row]."""
    if type_name not in GGUF_NAMES:
        return _converted(type_name, rows, num_in)
    weight_format = FORMATS[type_name]
    _check_row(type_name, rows, weight_format.row_bytes(num_in))
    return Source(weight_format, rows.shape[0], num_in, lambda first, end: RowPiece(rows[first:end]))


def _converted(type_name: str, rows: Rows, num_in: int) -> Source:
    quants, gguf_type, block_size, block_bytes = _gguf_type(type_name)
    FALLBACK_FORMAT.row_bytes(num_in)
    _check_row(type_name, rows, num_in // block_size * block_bytes if num_in % block_size == 0 else -1)
    _warn_converted(type_name)
    fallback_type = _gguf_type(FALLBACK_FORMAT.name)[1]

    def read(first: int, end: int) -> RowPiece:
        numbers = quants.dequantize(rows[first:end], gguf_type).reshape(end - first, num_in)
        return RowPiece(quants.quantize(numbers, fallback_type))

    return Source(FALLBACK_FORMAT, rows.shape[0], num_in, read)


def _check_row(type_name: str, rows: Rows, row_bytes: int) -> None:
    if rows.shape[1:] != (row_bytes,):
        raise CheckpointError(
            f"expected {row_bytes} bytes for each output of a tensor of type {type_name}, got {rows.shape}; the file "
            "is damaged: download it again"
        )


@cache
def _warn_converted(type_name: str) -> None:
    LOG.warning("no kernels for weights of type %s: converting them to 8 bits (Q8_0) while reading", type_name)


@cache
def _gguf_type(name: str) -> tuple[Any, Any, int, int]:
    """Return the gguf package's quantization module, its id of this type, and numbers and bytes per block."""
    import gguf  # noqa: PLC0415 - slow to import, rarely needed

    gguf_type = gguf.GGMLQuantizationType.__members__.get(name)
    if gguf_type is None or gguf_type not in gguf.quants._type_traits:
        raise CheckpointError(
            f"expected a weight of a type that the gguf package can read, got {name}; choose the model in one of "
            f"{', '.join(sorted(GGUF_NAMES))}",
            code="unknown_weight_type",
        )
    return gguf.quants, gguf_type, *gguf.GGML_QUANT_SIZES[gguf_type]
