"""Reads a model's tensors from its files for packing, a few rows at a time.

Weights keep the format of the file, or are converted to float32 or bfloat16 if the settings select a dtype. Executable
content is never read.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quire.backends.cpu.formats.gguf_source import FALLBACK_FORMAT, GGUF_NAMES, gguf_source
from quire.backends.cpu.formats.packed_weight import PackedWeight
from quire.backends.cpu.formats.safetensors_source import SCHEMES, StoredArray
from quire.backends.cpu.formats.source import RowPiece, Source
from quire.backends.cpu.formats.weight_format import FORMATS, WeightFormat
from quire.backends.kernels.arrays import Floats
from quire.backends.kernels.large_pages import Arena
from quire.backends.kernels.products import to_bf16
from quire.checkpoints import Checkpoint
from quire.checkpoints.families.matrix import HeadOrder, Matrix
from quire.checkpoints.quantisation import MXFP4_GROUP, Quantisation, read_quantisation
from quire.checkpoints.stored_tensors import FLOAT_BYTES, StoredTensor, dequantize, opened_weights, read_rows
from quire.errors import CheckpointError

FORMAT_BY_DTYPE = {"float32": FORMATS["F32"], "bfloat16": FORMATS["BF16"]}
"""The format of all weights if the settings select a dtype."""
EXPONENTS = {"F32": ("<u4", 0x7F800000), "F16": ("<u2", 0x7C00), "BF16": ("<u2", 0x7F80)}
"""For unquantized types: integer type and exponent bits, which are all ones in non-finite numbers."""
SCALE_OFFSETS = {
    "Q8_0": (0,), "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2),
    "Q6_K": (208,), "IQ4_NL": (0,), "IQ4_XS": (0,),
}  # fmt: skip
"""Byte offsets of the fp16 scales within a block."""
LARGEST_POWER = 252
"""Largest scale exponent of MXFP4: 6 * 2^(252 - 127) is the largest product that float32 can represent."""
DTYPES = {"U8": "u1", "I32": "<i4", "I64": "<i8", "F16": "<f2", "BF16": "<u2", "F32": "<f4", "F8_E4M3": "u1"}
"""Allowed types of a quantized weight's parts (codes, scales, ...), with the numpy types that read them."""


def format_of(tensor: StoredTensor, dtype: str) -> WeightFormat:
    """Return the format in which a weight is stored in memory."""
    if dtype in FORMAT_BY_DTYPE:
        return FORMAT_BY_DTYPE[dtype]
    if tensor.type in FORMATS:
        return FORMATS[tensor.type]
    return FORMATS["F32"] if tensor.type in FLOAT_BYTES else FALLBACK_FORMAT


@dataclass(frozen=True, slots=True)
class FileRows:
    """The rows of a tensor, read on access."""

    tensor: StoredTensor
    on_read: Callable[[int], None]

    @property
    def shape(self) -> tuple[int, int]:
        return self.tensor.num_rows, self.tensor.row_bytes

    def __getitem__(self, rows: slice, /) -> NDArray[np.uint8]:
        first, end, _ = rows.indices(self.tensor.num_rows)
        with opened_weights(self.tensor.path) as file:
            raw = read_rows(file, self.tensor, first, end - first)
        self.on_read(raw.nbytes)
        return raw

    def as_float32(self, first: int, end: int) -> Floats:
        """Return rows as float32. Raises CheckpointError if a number is not finite."""
        return _finite(dequantize(self[first:end], self.tensor.type), self.tensor)

    def parts(self) -> dict[str, StoredArray]:
        """Return all parts of a quantized weight."""
        return {
            name: StoredArray(part.type, FileRows(part, self.on_read)[:].view(DTYPES[part.type]).reshape(part.shape))
            for name, part in self.tensor.parts
        }


class WeightReader:
    """Finds and reads tensors by name."""

    def __init__(self, checkpoint: Checkpoint, dtype: str, on_read: Callable[[int], None]) -> None:
        self._tensors = checkpoint.tensors
        self._unread = dict(checkpoint.tensors)
        self._quantisation = read_quantisation(checkpoint.config)
        self._dtype = dtype
        self._on_read = on_read

    @property
    def unread_bytes(self) -> int:
        """Approximate memory of all unread tensors once packed."""
        return sum(packed_bytes(tensor, self._dtype) for tensor in self._unread.values())

    @property
    def unread_names(self) -> frozenset[str]:
        """Names of the tensors not read yet."""
        return frozenset(self._unread)

    def forget(self, name: str) -> None:
        """Mark a tensor as read, because the model does not need it."""
        self._unread.pop(name, None)

    def vector(self, name: str) -> Floats:
        """Return all numbers of a small tensor."""
        rows = self._take(name)
        return rows.as_float32(0, rows.tensor.num_rows).reshape(-1)

    def bias(self, matrix: Matrix) -> Floats | None:
        """Return the bias of a matrix, if any."""
        if matrix.bias is None:
            return None
        return self.vector(matrix.bias)[row_order(matrix)]

    def source(self, matrix: Matrix) -> Source:
        """Return a `Source` of a matrix's rows, in the format in which they will be stored in memory."""
        rows = self._take(matrix.name)
        if matrix.is_transposed and not rows.tensor.parts:
            return self._transposed(rows, matrix)
        num_in = matrix.shape[-2] if matrix.is_transposed else matrix.shape[-1]
        source = self._all_rows(rows, rows.tensor.num_values // num_in, num_in)
        order = row_order(matrix)
        return source if len(order) == source.num_out and bool((np.diff(order) == 1).all()) else _select(source, order)

    def _transposed(self, rows: FileRows, matrix: Matrix) -> Source:
        """Return the source of an expert in a plain tensor of shape [expert, in, out]."""
        _, num_in, width = matrix.shape
        expert = matrix.first // width
        columns = row_order(matrix) - expert * width
        fmt = format_of(rows.tensor, self._dtype)

        def read_float32(first: int, end: int) -> Floats:
            return rows.as_float32(expert * num_in, (expert + 1) * num_in).T[columns[first:end]]

        return _float_source(fmt if fmt.name == "BF16" else FORMATS["F32"], (matrix.num_out, num_in), read_float32)

    def _all_rows(self, rows: FileRows, num_out: int, num_in: int) -> Source:
        tensor = rows.tensor
        if tensor.type == "MXFP4" and tensor.parts:
            return self._in_selected_dtype(mxfp4_source(rows, num_out, num_in))
        if self._quantisation is not None and tensor.parts:
            return self._in_selected_dtype(_finite_source(scheme_source(rows, self._quantisation), tensor))
        if self._dtype not in FORMAT_BY_DTYPE and tensor.type not in FLOAT_BYTES.keys() - GGUF_NAMES:
            return _finite_source(gguf_source(tensor.type, rows, num_in), tensor)
        return _float_source(format_of(tensor, self._dtype), (num_out, num_in), rows.as_float32)

    def _in_selected_dtype(self, source: Source) -> Source:
        if self._dtype not in FORMAT_BY_DTYPE:
            return source

        def read_float32(first: int, end: int) -> Floats:
            chunk = Source(
                source.format, end - first, source.num_in, lambda a, b: source.read(first + a, first + b), source.group
            )
            return PackedWeight([chunk], Arena()).rows(np.arange(end - first))

        return _float_source(FORMAT_BY_DTYPE[self._dtype], (source.num_out, source.num_in), read_float32)

    def _take(self, name: str) -> FileRows:
        """Look up a tensor that `check_shapes` has verified. Raises CheckpointError if its type is not supported."""
        self._unread.pop(name, None)
        tensor = self._tensors[name]
        types = [part.type for _, part in tensor.parts] or [tensor.type]
        allowed = DTYPES if tensor.parts else FLOAT_BYTES
        if tensor.path.suffix == ".safetensors" and (unknown := sorted(set(types) - allowed.keys())):
            raise CheckpointError(
                f"expected weights of type {', '.join(allowed)}, got {unknown[0]} for {name!r} in {tensor.path.name}; "
                "choose an unquantised checkpoint of this model, or a GGUF of it"
            )
        return FileRows(tensor, self._on_read)


def row_order(matrix: Matrix) -> NDArray[np.int64]:
    """Return the indices of the tensor rows that form a matrix, in order.

    Elements of heads with partial or interleaved RoPE are permuted so that element i is rotated with element i + half;
    elements without rotation are placed last in both halves:

        rotated 0 1 2 3, fixed 4 5   ->   0 1 4  2 3 5        interleaved: 0 2 4  1 3 5
    """
    rows = matrix.first + matrix.step * np.arange(matrix.num_out)
    if matrix.group_stride:
        groups, offsets = np.divmod(np.arange(matrix.num_out), matrix.rows_per_group)
        rows = matrix.first + groups * matrix.group_stride + offsets
    if matrix.order is None:
        return rows
    return rows.reshape(-1, matrix.head_size)[:, element_order(matrix.order, matrix.head_size)].reshape(-1)


def element_order(order: HeadOrder, head_size: int) -> NDArray[np.int64]:
    """Return the permutation of a head's elements for this order."""
    rotated, fixed = np.split(np.arange(head_size), [order.num_rotated])
    pairs = rotated.reshape(-1, 2).T if order.is_interleaved else rotated.reshape(2, -1)
    return np.concatenate([pairs, fixed.reshape(2, -1)], axis=1).reshape(-1)


def _select(source: Source, order: NDArray[np.int64]) -> Source:
    def read(first: int, end: int) -> RowPiece:
        indices = order[first:end]
        low = int(indices.min())
        piece = source.read(low, int(indices.max()) + 1)
        scales = None if piece.scales is None else piece.scales[indices - low]
        zeros = None if piece.zeros is None else piece.zeros[indices - low]
        return RowPiece(piece.rows[indices - low], scales, zeros)

    return Source(source.format, len(order), source.num_in, read, source.group)


def packed_bytes(tensor: StoredTensor, dtype: str) -> int:
    """Return the approximate bytes of a packed tensor."""
    fmt = format_of(tensor, dtype)
    is_unchanged = dtype not in FORMAT_BY_DTYPE and tensor.type == fmt.name
    return tensor.num_bytes if is_unchanged else tensor.num_values * fmt.block_bytes // fmt.block_size


def scheme_source(rows: FileRows, quantisation: Quantisation) -> Source:
    """Return the source of a quantized weight, by the scheme in the model's config."""
    tensor = rows.tensor
    try:
        source = SCHEMES[quantisation.scheme](rows.parts(), quantisation)
        if (source.num_out, source.num_in) != tensor.shape:
            raise ValueError("the parts form a weight of another shape")
    except (ValueError, KeyError, IndexError, TypeError) as error:  # parts whose shapes do not fit each other
        shapes = ", ".join(f"{name} {list(part.shape)}" for name, part in tensor.parts)
        raise CheckpointError(
            f"expected parts that fit the quantised weight {list(tensor.shape)} in {tensor.path.name}, got {shapes}; "
            "download it again"
        ) from error
    return source


def mxfp4_source(rows: FileRows, num_out: int, num_in: int) -> Source:
    """Return gpt-oss experts converted to GGUF's MXFP4 blocks: a scale, then the first 16 codes in the low halves of
    bytes and the others in the high halves. In gpt-oss files consecutive codes share a byte."""
    parts = {name: FileRows(part, rows.on_read) for name, part in rows.tensor.parts}
    groups = num_in // MXFP4_GROUP

    def read(first: int, end: int) -> RowPiece:
        pairs = parts["blocks"][first * groups : end * groups]
        codes = np.stack([pairs & 15, pairs >> 4], axis=2).reshape(-1, 2, MXFP4_GROUP // 2)
        scales = parts["scales"][first:end].reshape(-1, 1)
        blocks = np.concatenate([scales, codes[:, 0] | codes[:, 1] << 4], axis=1)
        return RowPiece(blocks.reshape(end - first, -1))

    return Source(FORMATS["MXFP4"], num_out, num_in, read)


def _float_source(fmt: WeightFormat, shape: tuple[int, int], read_float32: Callable[[int, int], Floats]) -> Source:
    """Return a float32 or bfloat16 source whose rows are computed by `read_float32`."""

    def read(first: int, end: int) -> RowPiece:
        values = np.ascontiguousarray(read_float32(first, end))
        return RowPiece((to_bf16(values) if fmt.name == "BF16" else values).view(np.uint8))

    return Source(fmt, *shape, read)


def _finite_source(source: Source, tensor: StoredTensor) -> Source:
    """Wrap a source so that reading raises CheckpointError on non-finite numbers."""

    def read(first: int, end: int) -> RowPiece:
        piece = source.read(first, end)
        if not _is_finite(source.format, piece):
            raise _not_finite(tensor)
        return piece

    return Source(source.format, source.num_out, source.num_in, read, source.group)


def _finite(numbers: Floats, tensor: StoredTensor) -> Floats:
    if not np.isfinite(numbers).all():
        raise _not_finite(tensor)
    return numbers


def _not_finite(tensor: StoredTensor) -> CheckpointError:
    message = f"expected finite weights in {tensor.path.name}, got NaN or infinity; download it again"
    return CheckpointError(message, code="weights_not_finite")


def _is_finite(fmt: WeightFormat, piece: RowPiece) -> bool:
    """Whether a chunk represents finite numbers. Codes are small integers, so in a coded format only scales can be
    non-finite."""
    if piece.scales is not None and not np.isfinite(piece.scales).all():
        return False
    if fmt.name in EXPONENTS:
        return _finite_bits(piece.rows, *EXPONENTS[fmt.name])
    if fmt.name == "MXFP4":
        return int(_blocks(fmt, piece)[:, 0].max(initial=0)) <= LARGEST_POWER
    if fmt.name == "FP8_E4M3":
        return _finite_bits(piece.rows, "u1", 0x7F)
    blocks = _blocks(fmt, piece) if fmt.name in SCALE_OFFSETS else None
    return blocks is None or all(_finite_bits(blocks[:, i : i + 2], *EXPONENTS["F16"]) for i in SCALE_OFFSETS[fmt.name])


def _blocks(fmt: WeightFormat, piece: RowPiece) -> NDArray[np.uint8]:
    return piece.rows.reshape(-1, fmt.block_bytes)


def _finite_bits(rows: NDArray[np.uint8], int_type: str, mask: int) -> bool:
    bits = rows.view(int_type)
    return int((bits & bits.dtype.type(mask)).max(initial=0)) < mask
