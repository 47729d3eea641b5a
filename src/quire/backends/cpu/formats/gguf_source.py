"""Tensors of GGUF files: types with kernels are kept, others are converted to 8 bits with a warning in the log."""

import logging
from functools import cache
from typing import Any

from quire.backends.cpu.formats.source import RowPiece, Rows, Source
from quire.backends.cpu.formats.weight_format import FORMATS
from quire.errors import CheckpointError

LOG = logging.getLogger("quire.backends")

GGUF_NAMES = frozenset(name for name, made in FORMATS.items() if not made.has_group)
"""GGUF types that have kernels."""
WIDENED = FORMATS["Q8_0"]


def gguf_source(type_name: str, rows: Rows, num_in: int) -> Source:
    """Return a tensor as a source; `rows` are its bytes, [out, bytes per row]."""
    if type_name not in GGUF_NAMES:
        return _widened(type_name, rows, num_in)
    made = FORMATS[type_name]
    _check_row(type_name, rows, made.row_bytes(num_in))
    return Source(made, rows.shape[0], num_in, lambda first, end: RowPiece(rows[first:end]))


def _widened(type_name: str, rows: Rows, num_in: int) -> Source:
    quants, kind, block_size, block_bytes = _gguf_type(type_name)
    WIDENED.row_bytes(num_in)
    _check_row(type_name, rows, num_in // block_size * block_bytes if num_in % block_size == 0 else -1)
    _warn_widened(type_name)
    wide_kind = _gguf_type(WIDENED.name)[1]

    def read(first: int, end: int) -> RowPiece:
        numbers = quants.dequantize(rows[first:end], kind).reshape(end - first, num_in)
        return RowPiece(quants.quantize(numbers, wide_kind))

    return Source(WIDENED, rows.shape[0], num_in, read)


def _check_row(type_name: str, rows: Rows, row_bytes: int) -> None:
    if rows.shape[1:] != (row_bytes,):
        raise CheckpointError(
            f"expected {row_bytes} bytes for each output of a tensor of type {type_name}, got {rows.shape}; the file "
            "is damaged: download it again"
        )


@cache
def _warn_widened(type_name: str) -> None:
    LOG.warning("no kernels for weights of type %s: converting them to 8 bits (Q8_0) while reading", type_name)


@cache
def _gguf_type(name: str) -> tuple[Any, Any, int, int]:
    """Return the gguf package's quantization module, its id of the type, and numbers and bytes per block."""
    import gguf  # noqa: PLC0415 - slow to import, rarely needed

    kind = gguf.GGMLQuantizationType.__members__.get(name)
    if kind is None or kind not in gguf.quants._type_traits:
        raise CheckpointError(
            f"expected a weight of a type that the gguf package can read, got {name}; choose the model in one of "
            f"{', '.join(sorted(GGUF_NAMES))}",
            code="unknown_weight_type",
        )
    return gguf.quants, kind, *gguf.GGML_QUANT_SIZES[kind]
