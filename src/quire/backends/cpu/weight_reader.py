"""Reads a model's tensors from its files for packing, a few rows at a time.

Weights keep the format of the file, or become float32 or bfloat16 if the settings request it. Executable content is
never read.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quire.backends.cpu.formats.gguf_source import GGUF_NAMES, WIDENED, gguf_source
from quire.backends.cpu.formats.packed_weight import PackedWeight
from quire.backends.cpu.formats.safetensors_source import SCHEMES, StoredArray
from quire.backends.cpu.formats.source import RowPiece, Source
from quire.backends.cpu.formats.weight_format import FORMATS, WeightFormat
from quire.backends.kernels.arrays import Floats
from quire.backends.kernels.large_pages import Arena
from quire.backends.kernels.products import rounded_bf16
from quire.checkpoints import Checkpoint
from quire.checkpoints.families.matrix import HeadOrder, Matrix
from quire.checkpoints.quantisation import MXFP4_GROUP, Quantisation, read_quantisation
from quire.checkpoints.stored_tensors import FLOAT_BYTES, StoredTensor, numbers_of, opened_weights, read_rows
from quire.errors import CheckpointError

CHOSEN = {"float32": FORMATS["F32"], "bfloat16": FORMATS["BF16"]}
"""The format of all weights if the settings select a dtype."""
EXPONENTS = {"F32": ("<u4", 0x7F800000), "F16": ("<u2", 0x7C00), "BF16": ("<u2", 0x7F80)}
"""For plain numbers: the exponent bits, which are all ones in non-finite numbers."""
HALVES_AT = {
    "Q8_0": (0,), "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2),
    "Q6_K": (208,), "IQ4_NL": (0,), "IQ4_XS": (0,),
}  # fmt: skip
"""Byte offsets of the fp16 scales within a block."""
LARGEST_POWER = 252
"""Largest scale exponent of MXFP4: 6 * 2^(252 - 127) is the largest product that float32 can represent."""
READ_AS = {"U8": "u1", "I32": "<i4", "I64": "<i8", "F16": "<f2", "BF16": "<u2", "F32": "<f4", "F8_E4M3": "u1"}
"""Allowed types of a quantized weight's parts."""


def format_of(tensor: StoredTensor, dtype: str) -> WeightFormat:
    """Return the format in which a weight is stored in memory."""
    if dtype in CHOSEN:
        return CHOSEN[dtype]
    if tensor.type in FORMATS:
        return FORMATS[tensor.type]
    return FORMATS["F32"] if tensor.type in FLOAT_BYTES else WIDENED


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

    def numbers(self, first: int, end: int) -> Floats:
        """Return rows as float32. Raises CheckpointError if a number is not finite."""
        return _finite(numbers_of(self[first:end], self.tensor.type), self.tensor)

    def parts(self) -> dict[str, StoredArray]:
        """Return all parts of a quantized weight."""
        return {
            name: StoredArray(part.type, FileRows(part, self.on_read)[:].view(READ_AS[part.type]).reshape(part.shape))
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
    def num_bytes(self) -> int:
        """Approximate memory of all unread tensors once packed."""
        return sum(held_bytes(tensor, self._dtype) for tensor in self._unread.values())

    @property
    def names(self) -> frozenset[str]:
        """Names of the tensors not read yet."""
        return frozenset(self._unread)

    def forget(self, name: str) -> None:
        """Mark a tensor that the model does not need as read."""
        self._unread.pop(name, None)

    def vector(self, name: str) -> Floats:
        """Return all numbers of a small tensor."""
        rows = self._take(name)
        return rows.numbers(0, rows.tensor.num_rows).reshape(-1)

    def bias(self, matrix: Matrix) -> Floats | None:
        """Return the bias of a matrix, if any."""
        if matrix.bias is None:
            return None
        return self.vector(matrix.bias)[row_order(matrix)]

    def source(self, matrix: Matrix) -> Source:
        """Return a matrix as a source in its in-memory format."""
        rows = self._take(matrix.name)
        if matrix.is_transposed and not rows.tensor.parts:
            return self._transposed(rows, matrix)
        num_in = matrix.shape[-2] if matrix.is_transposed else matrix.shape[-1]
        whole = self._whole(rows, rows.tensor.num_values // num_in, num_in)
        order = row_order(matrix)
        return whole if len(order) == whole.num_out and bool((np.diff(order) == 1).all()) else _selected(whole, order)

    def _transposed(self, rows: FileRows, matrix: Matrix) -> Source:
        """Return the source of an expert in a plain tensor of shape [expert, in, out]."""
        _, num_in, width = matrix.shape
        expert = matrix.first // width
        columns = row_order(matrix) - expert * width
        made = format_of(rows.tensor, self._dtype)

        def numbers(first: int, end: int) -> Floats:
            return rows.numbers(expert * num_in, (expert + 1) * num_in).T[columns[first:end]]

        return _of_numbers(made if made.name == "BF16" else FORMATS["F32"], (matrix.num_out, num_in), numbers)

    def _whole(self, rows: FileRows, num_out: int, num_in: int) -> Source:
        tensor = rows.tensor
        if tensor.type == "MXFP4" and tensor.parts:
            return self._chosen(mxfp4_source(rows, num_out, num_in))
        if self._quantisation is not None and tensor.parts:
            return self._chosen(_checked(scheme_source(rows, self._quantisation), tensor))
        if self._dtype not in CHOSEN and tensor.type not in FLOAT_BYTES.keys() - GGUF_NAMES:
            return _checked(gguf_source(tensor.type, rows, num_in), tensor)
        return _of_numbers(format_of(tensor, self._dtype), (num_out, num_in), rows.numbers)

    def _chosen(self, source: Source) -> Source:
        if self._dtype not in CHOSEN:
            return source

        def numbers(first: int, end: int) -> Floats:
            some = Source(
                source.format, end - first, source.num_in, lambda a, b: source.read(first + a, first + b), source.group
            )
            return PackedWeight([some], Arena()).rows(np.arange(end - first))

        return _of_numbers(CHOSEN[self._dtype], (source.num_out, source.num_in), numbers)

    def _take(self, name: str) -> FileRows:
        """Look up a tensor whose name and shape `check_shapes` has verified. Raises CheckpointError on its type."""
        self._unread.pop(name, None)
        tensor = self._tensors[name]
        kinds = [part.type for _, part in tensor.parts] or [tensor.type]
        allowed = READ_AS if tensor.parts else FLOAT_BYTES
        if tensor.path.suffix == ".safetensors" and (strange := sorted(set(kinds) - allowed.keys())):
            raise CheckpointError(
                f"expected weights of type {', '.join(allowed)}, got {strange[0]} for {name!r} in {tensor.path.name}; "
                "choose a checkpoint that is not quantised, or its GGUF"
            )
        return FileRows(tensor, self._on_read)


def row_order(matrix: Matrix) -> NDArray[np.int64]:
    """Return the indices of the tensor rows that form a matrix, in order.

    Elements of heads with partial or interleaved RoPE are permuted so that element i is rotated with element i + half;
    elements without rotation are placed last in both halves:

        rotated 0 1 2 3, fixed 4 5   ->   0 1 4  2 3 5        interleaved: 0 2 4  1 3 5
    """
    rows = matrix.first + matrix.step * np.arange(matrix.num_out)
    if matrix.every:
        groups, at = np.divmod(np.arange(matrix.num_out), matrix.each)
        rows = matrix.first + groups * matrix.every + at
    if matrix.order is None:
        return rows
    return rows.reshape(-1, matrix.head_size)[:, numbers_in_order(matrix.order, matrix.head_size)].reshape(-1)


def numbers_in_order(order: HeadOrder, head_size: int) -> NDArray[np.int64]:
    """Return the permutation of a head's elements."""
    turning, still = np.split(np.arange(head_size), [order.num_rotated])
    pairs = turning.reshape(-1, 2).T if order.is_interleaved else turning.reshape(2, -1)
    return np.concatenate([pairs, still.reshape(2, -1)], axis=1).reshape(-1)


def _selected(source: Source, order: NDArray[np.int64]) -> Source:
    def read(first: int, end: int) -> RowPiece:
        wanted = order[first:end]
        low = int(wanted.min())
        piece = source.read(low, int(wanted.max()) + 1)
        scales = None if piece.scales is None else piece.scales[wanted - low]
        zeros = None if piece.zeros is None else piece.zeros[wanted - low]
        return RowPiece(piece.rows[wanted - low], scales, zeros)

    return Source(source.format, len(order), source.num_in, read, source.group)


def held_bytes(tensor: StoredTensor, dtype: str) -> int:
    """Return the approximate bytes of a packed tensor."""
    made = format_of(tensor, dtype)
    is_as_stored = dtype not in CHOSEN and tensor.type == made.name
    return tensor.num_bytes if is_as_stored else tensor.num_values * made.block_bytes // made.block_size


def scheme_source(rows: FileRows, quantisation: Quantisation) -> Source:
    """Return the source of a quantized weight, by the scheme in the model's config."""
    tensor = rows.tensor
    try:
        source = SCHEMES[quantisation.scheme](rows.parts(), quantisation)
        if (source.num_out, source.num_in) != tensor.shape:
            raise ValueError("the parts are a weight of another shape")
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
        made = np.concatenate([scales, codes[:, 0] | codes[:, 1] << 4], axis=1)
        return RowPiece(made.reshape(end - first, -1))

    return Source(FORMATS["MXFP4"], num_out, num_in, read)


def _of_numbers(made: WeightFormat, shape: tuple[int, int], numbers: Callable[[int, int], Floats]) -> Source:
    """Return a float32 or bfloat16 source whose rows are computed by `numbers`."""

    def read(first: int, end: int) -> RowPiece:
        wide = np.ascontiguousarray(numbers(first, end))
        return RowPiece((rounded_bf16(wide) if made.name == "BF16" else wide).view(np.uint8))

    return Source(made, *shape, read)


def _checked(source: Source, tensor: StoredTensor) -> Source:
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
    message = f"{tensor.path.name} holds weights that are NaN or infinity; download it again"
    return CheckpointError(message, code="weights_not_finite")


def _is_finite(made: WeightFormat, piece: RowPiece) -> bool:
    """Whether a chunk represents finite numbers. Codes are small integers, so in a coded format only scales can be
    non-finite."""
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
