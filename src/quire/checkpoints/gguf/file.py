"""Reads the header of a GGUF file and trusts none of it.

Every count, length, dimension and offset is checked against the file's size before anything is made of it, so a
damaged or hostile file ends in a CheckpointError, quickly and in little memory. Tensor data is read with plain reads,
not mapped: a file that shrinks meanwhile is an error, not a SIGBUS.
"""

import os
import stat
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

from quire.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class TensorType:
    """How a kind of tensor lies in the file: this many bytes hold this many values."""

    name: str
    block_values: int
    block_bytes: int


TENSOR_TYPES = {
    0: TensorType("F32", 1, 4),
    1: TensorType("F16", 1, 2),
    2: TensorType("Q4_0", 32, 18),
    3: TensorType("Q4_1", 32, 20),
    6: TensorType("Q5_0", 32, 22),
    7: TensorType("Q5_1", 32, 24),
    8: TensorType("Q8_0", 32, 34),
    10: TensorType("Q2_K", 256, 84),
    11: TensorType("Q3_K", 256, 110),
    12: TensorType("Q4_K", 256, 144),
    13: TensorType("Q5_K", 256, 176),
    14: TensorType("Q6_K", 256, 210),
    16: TensorType("IQ2_XXS", 256, 66),
    17: TensorType("IQ2_XS", 256, 74),
    18: TensorType("IQ3_XXS", 256, 98),
    19: TensorType("IQ1_S", 256, 50),
    20: TensorType("IQ4_NL", 32, 18),
    21: TensorType("IQ3_S", 256, 110),
    22: TensorType("IQ2_S", 256, 82),
    23: TensorType("IQ4_XS", 256, 136),
    29: TensorType("IQ1_M", 256, 56),
    30: TensorType("BF16", 1, 2),
    34: TensorType("TQ1_0", 256, 54),
    35: TensorType("TQ2_0", 256, 66),
    39: TensorType("MXFP4", 32, 17),
}
"""By their numbers in files: those whose numbers the `gguf` package can tell."""


def type_numbered(number: int, name: str) -> TensorType:
    """The type of the tensor of this name, or a CheckpointError that says which there are."""
    if number not in TENSOR_TYPES:
        from gguf import GGMLQuantizationType

        known = {kind.value: kind.name for kind in GGMLQuantizationType}
        supported = ", ".join(kind.name for kind in TENSOR_TYPES.values())
        rule = f"expected type {supported}, got {known.get(number, f'number {number}')}"
        way_out = "choose another file of this model, for example Q8_0 or Q4_K_M"
        raise CheckpointError(f"tensor {name[:100]!r}: {rule}; {way_out}", code="unsupported_tensor_type")
    return TENSOR_TYPES[number]


MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_KEYS = 65_536
MAX_TENSORS = 65_536
MAX_ARRAY_ITEMS = 4_194_304  # of all arrays together; a vocabulary of 256,000 with its merges has about 1,300,000
MAX_HEADER_BYTES = 512 * 1024 * 1024
MAX_NAME_BYTES = 65_535
MAX_STRING_BYTES = 16 * 1024 * 1024
MAX_DIMENSIONS = 4
MAX_ALIGNMENT = 1_048_576
DEFAULT_ALIGNMENT = 32

STRING, ARRAY = 8, 9
NUMBER_CODES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """One tensor's place in the file. `shape` has rows first, as numpy and Hugging Face write it."""

    path: Path
    name: str
    shape: tuple[int, ...]
    type: TensorType
    offset: int
    num_bytes: int

    @property
    def num_rows(self) -> int:
        """How many rows there are: all dimensions but the last."""
        rows = 1
        for size in self.shape[:-1]:
            rows *= size
        return rows

    @property
    def row_bytes(self) -> int:
        return self.num_bytes // self.num_rows


@dataclass(frozen=True, slots=True)
class GGUFFile:
    """What a GGUF file says of itself, checked."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]
    header_bytes: int
    file_bytes: int
    modified_ns: int


def read_gguf(path: Path) -> GGUFFile:
    """Parse and check the header."""
    with opened_gguf(path) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            rule = f"expected {path.name} to be a regular file; give the path of a .gguf file"
            raise CheckpointError(rule, code="not_regular_file")
        reader = _Reader(file, path.name, status.st_size)
        num_tensors, num_keys = _read_counts(reader)
        metadata = _read_metadata(reader, num_keys)
        infos = [_read_tensor_info(reader, path) for _ in range(num_tensors)]
        tensors = _place_tensors(reader, infos, _alignment(reader, metadata))
        return GGUFFile(path, metadata, tensors, reader.position, status.st_size, status.st_mtime_ns)


def read_exactly(file: BinaryIO, offset: int, num_bytes: int) -> bytes:
    """These bytes of the file; a CheckpointError if it ends before, because it shrank since it was checked."""
    try:
        file.seek(offset)
        raw = file.read(num_bytes)
    except OSError as error:
        raise CheckpointError(f"the model file cannot be read: {error.strerror}; check the disk") from error
    if len(raw) != num_bytes:
        early = f"the model file ended {num_bytes - len(raw):,} bytes early; wait until its download has finished"
        raise CheckpointError(early, code="file_cut_off")
    return raw


@contextmanager
def opened_gguf(path: Path) -> Iterator[BinaryIO]:
    """The file for reading, or a CheckpointError."""
    try:
        # Non-blocking, so that a named pipe without a writer is refused and not waited for.
        file = open(path, "rb", buffering=1 << 20, opener=lambda name, flags: os.open(name, flags | _NONBLOCK))  # noqa: SIM115
    except OSError as error:
        sentence = f"{path} cannot be opened: {error.strerror}; check the path"
        raise CheckpointError(sentence, code="file_not_readable") from error
    with file:
        yield file


_NONBLOCK = getattr(os, "O_NONBLOCK", 0)


class _Reader:
    """A cursor that never reads beyond the file's end."""

    def __init__(self, file: BinaryIO, name: str, file_bytes: int) -> None:
        self.name = name
        self.file_bytes = file_bytes
        self.position = 0
        self.num_items_left = MAX_ARRAY_ITEMS
        self._end = min(file_bytes, MAX_HEADER_BYTES)
        self._file = file
        self._read = file.read

    def damaged(self, code: str, what: str) -> CheckpointError:
        where = f"(near byte {self.position:,})"
        return CheckpointError(f"{self.name} is not a valid GGUF file: {what} {where}; download it again", code=code)

    def take(self, num_bytes: int) -> bytes:
        if num_bytes > self._end - self.position:
            sizes = f"expected {num_bytes:,} more bytes, got {self._end - self.position:,}"
            raise self.damaged("header_cut_off", sizes)
        raw = self._read(num_bytes)
        if len(raw) != num_bytes:
            raise self.damaged("header_cut_off", "the file shrank during reading")
        self.position += num_bytes
        return raw

    def u32(self) -> int:
        return int.from_bytes(self.take(4), "little")

    def u64(self) -> int:
        return int.from_bytes(self.take(8), "little")

    def count(self, what: str, limit: int, bytes_each: int) -> int:
        """A number of things to follow, each of at least `bytes_each` bytes."""
        number = self.u64()
        if number > limit:
            code = f"too_many_{what.split(maxsplit=1)[0]}"
            raise self.damaged(code, f"expected at most {limit:,} {what}, got {number:,}")
        if number * bytes_each > self._end - self.position:
            raise self.damaged("count_beyond_file", f"{number:,} {what} do not fit into the rest of the file")
        return number

    def string(self, limit: int = MAX_STRING_BYTES) -> str:
        raw = self.take(self.count("bytes in a string", limit, 1))
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise self.damaged("string_not_utf8", "a string is not UTF-8") from error

    def strings(self, count: int) -> list[str]:
        """So many strings. A vocabulary has a quarter of a million: whatever is sound is read without a call for each
        part, and what is not is read again by `string`, which says what is wrong."""
        found: list[str] = []
        read, end, position = self._read, self._end, self.position
        try:
            for _ in range(count):
                size = int.from_bytes(read(8), "little")
                if size > MAX_STRING_BYTES or position + 8 + size > end:
                    break
                raw = read(size)
                if len(raw) != size:
                    break
                found.append(raw.decode())
                position += 8 + size
        except UnicodeDecodeError:
            pass
        self._file.seek(position)
        self.position = position
        return found + [self.string() for _ in range(count - len(found))]


def _read_counts(reader: _Reader) -> tuple[int, int]:
    if reader.take(4) != MAGIC:
        raise reader.damaged("magic_missing", "it does not begin with 'GGUF'")
    raw = reader.take(4)
    version = int.from_bytes(raw, "little")
    if version not in VERSIONS:
        is_big = int.from_bytes(raw, "big") in VERSIONS
        kind = "is big-endian" if is_big else f"has version {version}"
        rule = f"expected GGUF version {VERSIONS[0]} or {VERSIONS[1]}, little-endian; {reader.name} {kind}"
        raise CheckpointError(f"{rule}; convert it again", code="big_endian" if is_big else "unsupported_version")
    num_tensors = reader.count("tensors", MAX_TENSORS, 24)
    return num_tensors, reader.count("keys", MAX_KEYS, 13)


def _read_metadata(reader: _Reader, num_keys: int) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for _ in range(num_keys):
        key = reader.string(MAX_NAME_BYTES)
        if key in metadata:
            raise reader.damaged("duplicate_key", f"duplicate key {key[:100]!r}")
        metadata[key] = _read_value(reader, reader.u32())
    return metadata


def _read_value(reader: _Reader, kind: int) -> Any:
    if kind == STRING:
        return reader.string()
    if kind == ARRAY:
        return _read_array(reader)
    return _read_numbers(reader, kind, 1)[0]


def _read_array(reader: _Reader) -> list[Any]:
    kind = reader.u32()
    num_items = reader.count("items in its arrays", reader.num_items_left, 8 if kind == STRING else 1)
    reader.num_items_left -= num_items
    if kind == STRING:
        return reader.strings(num_items)
    return list(_read_numbers(reader, kind, num_items))


def _read_numbers(reader: _Reader, kind: int, num_items: int) -> tuple[Any, ...]:
    code = NUMBER_CODES.get(kind)
    if code is None:
        raise reader.damaged("unknown_metadata_type", f"unsupported metadata type {kind}")
    layout = f"<{num_items}{code}"
    return struct.unpack(layout, reader.take(struct.calcsize(layout)))


def _alignment(reader: _Reader, metadata: dict[str, Any]) -> int:
    value = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if not isinstance(value, int) or not 1 <= value <= MAX_ALIGNMENT or value & (value - 1):
        rule = f"expected the alignment to be a power of two up to {MAX_ALIGNMENT:,}, got {str(value)[:40]}"
        raise reader.damaged("invalid_alignment", rule)
    return value


def _read_tensor_info(reader: _Reader, path: Path) -> GGUFTensor:
    """One tensor with its offset still counted from where the data begins."""
    name = reader.string(MAX_NAME_BYTES)
    num_dimensions = reader.u32()
    if not 1 <= num_dimensions <= MAX_DIMENSIONS:
        rule = f"tensor {name[:100]!r}: expected 1 to {MAX_DIMENSIONS} dimensions, got {num_dimensions:,}"
        raise reader.damaged("invalid_num_dimensions", rule)
    shape = tuple(reversed([reader.u64() for _ in range(num_dimensions)]))
    kind = type_numbered(reader.u32(), name)
    num_values = 1
    for size in shape:
        num_values *= size
    if num_values == 0 or shape[-1] % kind.block_values:
        rule = f"expected rows of whole blocks of {kind.block_values} values, got rows of {shape[-1]:,}"
        raise reader.damaged("rows_not_whole_blocks", f"tensor {name[:100]!r} of type {kind.name}: {rule}")
    num_bytes = num_values // kind.block_values * kind.block_bytes
    return GGUFTensor(path, name, shape, kind, reader.u64(), num_bytes)


def _place_tensors(reader: _Reader, infos: list[GGUFTensor], alignment: int) -> dict[str, GGUFTensor]:
    start = -(-reader.position // alignment) * alignment
    tensors: dict[str, GGUFTensor] = {}
    free_from = start
    for info in sorted(infos, key=lambda info: info.offset):
        offset = start + info.offset
        if info.offset % alignment or offset + info.num_bytes > reader.file_bytes:
            fault = f"the data of tensor {info.name[:100]!r} is misaligned or ends beyond the file"
            raise reader.damaged("tensor_misplaced", fault)
        if offset < free_from:
            fault = f"the data of tensor {info.name[:100]!r} overlaps that of another"
            raise reader.damaged("tensors_overlap", fault)
        if info.name in tensors:
            raise reader.damaged("duplicate_tensor", f"duplicate tensor {info.name[:100]!r}")
        free_from = offset + info.num_bytes
        tensors[info.name] = replace(info, offset=offset)
    return tensors
