"""A model's tensors on their way from its files to packed weights, a few rows at a time.

Weights stay what the file has, or become float32 or bfloat16 if that is asked for. Nothing that can execute is ever
read.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quire.backends.cpu.formats import (
    FORMATS,
    SCHEMES,
    PackedWeight,
    Source,
    StoredArray,
    WeightFormat,
    gguf_source,
)
from quire.backends.cpu.formats.gguf_source import GGUF_NAMES, WIDENED
from quire.backends.cpu.formats.safetensors_source import SchemeOptions
from quire.backends.cpu.formats.source import RowPiece
from quire.backends.kernels.arrays import Floats
from quire.backends.kernels.large_pages import Arena
from quire.backends.kernels.products import rounded_bf16
from quire.backends.kernels.threads import num_threads
from quire.checkpoints import Checkpoint
from quire.checkpoints.families.matrix import HeadOrder, Matrix
from quire.checkpoints.quantisation import MXFP4_GROUP, Quantisation, read_quantisation
from quire.checkpoints.stored_tensors import FLOAT_BYTES, StoredTensor, numbers_of, opened_weights, read_rows
from quire.errors import CheckpointError

CHOSEN = {"float32": FORMATS["F32"], "bfloat16": FORMATS["BF16"]}
"""What all weights become where that is asked for."""
EXPONENTS = {"F32": ("<u4", 0x7F800000), "F16": ("<u2", 0x7C00), "BF16": ("<u2", 0x7F80)}
"""Of plain numbers: the bits that are all ones in what is not finite."""
HALVES_AT = {
    "Q8_0": (0,), "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2),
    "Q6_K": (208,), "IQ4_NL": (0,), "IQ4_XS": (0,),
}  # fmt: skip
"""Where a block has its scales, in fp16."""
LARGEST_POWER = 252
"""Of MXFP4: six times two to the power of 252 - 127 is the largest that float32 holds."""
READ_AS = {"U8": "u1", "I32": "<i4", "I64": "<i8", "F16": "<f2", "BF16": "<u2", "F32": "<f4", "F8_E4M3": "u1"}
"""Types that a quantised weight's parts may have."""


def format_of(tensor: StoredTensor, dtype: str) -> WeightFormat:
    """How a weight is held."""
    if dtype in CHOSEN:
        return CHOSEN[dtype]
    if tensor.type in FORMATS:
        return FORMATS[tensor.type]
    return FORMATS["F32"] if tensor.type in FLOAT_BYTES else WIDENED


@dataclass(frozen=True, slots=True)
class FileRows:
    """The rows of a tensor, read when they are asked for."""

    tensor: StoredTensor
    on_read: Callable[[int], None]

    @property
    def shape(self) -> tuple[int, int]:
        """Rows, and the bytes of each."""
        return self.tensor.num_rows, self.tensor.row_bytes

    def __getitem__(self, rows: slice, /) -> NDArray[np.uint8]:
        first, end, _ = rows.indices(self.tensor.num_rows)
        with opened_weights(self.tensor.path) as file:
            raw = read_rows(file, self.tensor, first, end - first)
        self.on_read(raw.nbytes)
        return raw

    def numbers(self, first: int, end: int) -> Floats:
        """Some of them as float32."""
        return _finite(numbers_of(self[first:end], self.tensor.type), self.tensor)

    def parts(self) -> dict[str, StoredArray]:
        """What a quantised weight is made of, whole."""
        return {
            name: StoredArray(part.type, FileRows(part, self.on_read)[:].view(READ_AS[part.type]).reshape(part.shape))
            for name, part in self.tensor.parts
        }


class WeightReader:
    """Finds tensors by name and reads them, checking every shape."""

    def __init__(self, checkpoint: Checkpoint, dtype: str, on_read: Callable[[int], None]) -> None:
        self._tensors = checkpoint.tensors
        self._unread = dict(checkpoint.tensors)
        self._quantisation = read_quantisation(checkpoint.config)
        self._dtype = dtype
        self._on_read = on_read

    @property
    def num_bytes(self) -> int:
        """About the bytes that all unread tensors will take."""
        return sum(held_bytes(tensor, self._dtype) for tensor in self._unread.values())

    @property
    def names(self) -> frozenset[str]:
        """Tensors that have not been read yet."""
        return frozenset(self._unread)

    def has(self, name: str) -> bool:
        """Whether such a tensor is there and unread."""
        return name in self._unread

    def forget(self, name: str) -> None:
        """Pass over a tensor that the model does not need."""
        self._unread.pop(name, None)

    def vector(self, name: str, shape: tuple[int, ...]) -> Floats:
        """All numbers of a small tensor, in order."""
        rows = self._take(name, shape)
        return rows.numbers(0, rows.tensor.num_rows).reshape(-1)

    def bias(self, matrix: Matrix) -> Floats | None:
        """Of its outputs, if it has one."""
        if matrix.bias is None:
            return None
        return self.vector(matrix.bias, matrix.bias_shape)[row_order(matrix)]

    def source(self, matrix: Matrix) -> Source:
        """A matrix in the format in which it will be held."""
        rows = self._take(matrix.name, matrix.shape)
        if matrix.is_transposed and not rows.tensor.parts:
            return self._transposed(rows, matrix)
        num_in = matrix.shape[-2] if matrix.is_transposed else matrix.shape[-1]
        whole = self._whole(rows, rows.tensor.num_values // num_in, num_in)
        order = row_order(matrix)
        return whole if len(order) == whole.num_out and bool((np.diff(order) == 1).all()) else _selected(whole, order)

    def _transposed(self, rows: FileRows, matrix: Matrix) -> Source:
        """Of plain numbers, [expert, in, out]."""
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
            return PackedWeight([some], Arena(), num_threads()).rows(np.arange(end - first), num_threads())

        return _of_numbers(CHOSEN[self._dtype], (source.num_out, source.num_in), numbers)

    def _take(self, name: str, shape: tuple[int, ...]) -> FileRows:
        self._unread.pop(name, None)
        tensor = self._tensors.get(name)
        if tensor is None:
            raise CheckpointError(
                f"expected a tensor {name!r} in the files of the model, found none; download them again"
            )
        if tensor.shape != shape:
            raise CheckpointError(
                f"expected tensor {name!r} to have the shape {shape} that config.json implies, got {tensor.shape} in "
                f"{tensor.path.name}; the files belong to different models"
            )
        kinds = [part.type for _, part in tensor.parts] or [tensor.type]
        allowed = READ_AS if tensor.parts else FLOAT_BYTES
        if tensor.path.suffix == ".safetensors" and (strange := sorted(set(kinds) - allowed.keys())):
            raise CheckpointError(
                f"expected weights of type {', '.join(allowed)}, got {strange[0]} for {name!r} in {tensor.path.name}; "
                "choose a checkpoint that is not quantised, or its GGUF"
            )
        return FileRows(tensor, self._on_read)


def row_order(matrix: Matrix) -> NDArray[np.int64]:
    """Which rows of its tensor a matrix takes, in their order.

    Heads of which a part turns, or neighbour with neighbour, are laid so that number i turns with number i + half, and
    those that do not turn stand behind the others in both halves:

        turning 0 1 2 3, still 4 5   ->   0 1 4  2 3 5        interleaved: 0 2 4  1 3 5
    """
    rows = matrix.first + matrix.step * np.arange(matrix.num_out)
    if matrix.every:
        groups, at = np.divmod(np.arange(matrix.num_out), matrix.each)
        rows = matrix.first + groups * matrix.every + at
    if matrix.order is None:
        return rows
    return rows.reshape(-1, matrix.head_size)[:, numbers_in_order(matrix.order, matrix.head_size)].reshape(-1)


def numbers_in_order(order: HeadOrder, head_size: int) -> NDArray[np.int64]:
    """Which number of a head goes where."""
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
    """What a tensor takes once it is packed, but for a little."""
    made = format_of(tensor, dtype)
    is_as_stored = dtype not in CHOSEN and tensor.type == made.name
    return tensor.num_bytes if is_as_stored else tensor.num_values * made.block_bytes // made.block_size


def scheme_source(rows: FileRows, quantisation: Quantisation) -> Source:
    """A quantised weight by what its model's config says of all of them."""
    options = SchemeOptions(
        quantisation.num_bits, quantisation.group_size, quantisation.is_symmetric, quantisation.zeros_are_less_one
    )
    try:
        source = SCHEMES[quantisation.scheme](rows.parts(), options)
    except (ValueError, KeyError, IndexError, TypeError) as error:  # parts whose shapes do not fit each other
        raise _unfitting(rows.tensor) from error
    if (source.num_out, source.num_in) != rows.tensor.shape:
        raise _unfitting(rows.tensor)
    return source


def mxfp4_source(rows: FileRows, num_out: int, num_in: int) -> Source:
    """Experts as gpt-oss has them, read as GGUF's blocks of the same numbers: a scale, then low halves of bytes for the
    first sixteen numbers and high halves for the others; here neighbours share a byte."""
    parts = {name: FileRows(part, rows.on_read) for name, part in rows.tensor.parts}
    groups = num_in // MXFP4_GROUP

    def read(first: int, end: int) -> RowPiece:
        pairs = parts["blocks"][first * groups : end * groups]
        codes = np.stack([pairs & 15, pairs >> 4], axis=2).reshape(-1, 2, MXFP4_GROUP // 2)
        scales = parts["scales"][first:end].reshape(-1, 1)
        made = np.concatenate([scales, codes[:, 0] | codes[:, 1] << 4], axis=1)
        return RowPiece(made.reshape(end - first, -1))

    return Source(FORMATS["MXFP4"], num_out, num_in, read)


def _unfitting(tensor: StoredTensor) -> CheckpointError:
    shapes = ", ".join(f"{name} {list(part.shape)}" for name, part in tensor.parts)
    return CheckpointError(
        f"expected parts that fit the quantised weight {list(tensor.shape)} in {tensor.path.name}, got {shapes}; "
        "download it again"
    )


def _of_numbers(made: WeightFormat, shape: tuple[int, int], numbers: Callable[[int, int], Floats]) -> Source:
    """A source in float32 or bfloat16, of numbers that are made for it."""

    def read(first: int, end: int) -> RowPiece:
        wide = np.ascontiguousarray(numbers(first, end))
        return RowPiece((rounded_bf16(wide) if made.name == "BF16" else wide).view(np.uint8))

    return Source(made, *shape, read)


def _checked(source: Source, tensor: StoredTensor) -> Source:
    """The same, refusing what is not finite."""

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
    """Whether the piece stands for finite numbers. Codes are small whole numbers: of a coded format only scales can
    be wrong."""
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
