"""Reads the header of a GGUF file and validates all of it.

Every count, length, dimension and offset is checked against the file's size before use, so a damaged or malicious file
raises CheckpointError quickly and with little memory. Tensor data is read with plain reads instead of a memory map, so
a file that shrinks while in use causes an error, not a SIGBUS.
"""

import math
import os
import stat
import struct
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from quire.checkpoints.stored_tensors import StoredTensor, opened_weights
from quire.errors import CheckpointError


class TensorType(NamedTuple):
    """A tensor dtype of the file format: `block_bytes` bytes store `block_values` values."""

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
"""Dtypes by their id in files: those that the `gguf` package can dequantize."""


def tensor_type(number: int, name: str) -> TensorType:
    """Return the dtype with this id. Raises CheckpointError, which also names the supported dtypes."""
    if number not in TENSOR_TYPES:
        from gguf import GGMLQuantizationType

        type_names = {kind.value: kind.name for kind in GGMLQuantizationType}
        supported = ", ".join(kind.name for kind in TENSOR_TYPES.values())
        message = f"expected type {supported}, got {type_names.get(number, f'number {number}')}"
        hint = "choose another file of this model, for example Q8_0 or Q4_K_M"
        raise CheckpointError(f"tensor {name[:100]!r}: {message}; {hint}", code="unsupported_tensor_type")
    return TENSOR_TYPES[number]


MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_KEYS = 65_536
MAX_TENSORS = 65_536
MAX_ARRAY_ITEMS = 4_194_304  # for all arrays together; a vocabulary of 256,000 with its merges has about 1,300,000
MAX_HEADER_BYTES = 512 * 1024 * 1024
MAX_NAME_BYTES = 65_535
MAX_STRING_BYTES = 16 * 1024 * 1024
MAX_DIMENSIONS = 4
MAX_ALIGNMENT = 1_048_576
DEFAULT_ALIGNMENT = 32

STRING, ARRAY = 8, 9
NUMBER_CODES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


@dataclass(frozen=True, slots=True)
class GGUFFile:
    """The validated header of a GGUF file."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, StoredTensor]
    header_bytes: int
    file_bytes: int
    modified_ns: int


def read_gguf(path: Path) -> GGUFFile:
    """Parse and validate the header. Raises CheckpointError if the file is not a valid GGUF file."""
    with opened_weights(path) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            message = f"expected {path.name} to be a regular file; give the path of a .gguf file"
            raise CheckpointError(message, code="not_regular_file")
        reader = _Reader(file, path.name, status.st_size)
        num_tensors, num_keys = _read_counts(reader)
        metadata = _read_metadata(reader, num_keys)
        infos = [_read_tensor_info(reader, path) for _ in range(num_tensors)]
        tensors = _place_tensors(reader, infos, _alignment(reader, metadata))
        return GGUFFile(path, metadata, tensors, reader.position, status.st_size, status.st_mtime_ns)


class _Reader:
    """Reads values one after the other, and never beyond the end of the file or `MAX_HEADER_BYTES`."""

    def __init__(self, file: BinaryIO, name: str, file_bytes: int) -> None:
        self.name = name
        self.file_bytes = file_bytes
        self.position = 0
        self.num_items_left = MAX_ARRAY_ITEMS
        self._end = min(file_bytes, MAX_HEADER_BYTES)
        self._file = file
        self._read = file.read

    def damaged(self, code: str, fault: str) -> CheckpointError:
        fault = f"{fault} (near byte {self.position:,})"
        return CheckpointError(f"{self.name} is not a valid GGUF file: {fault}; download it again", code=code)

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
        """Read the number of following items, each of at least `bytes_each` bytes."""
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
        """Read `count` strings. A vocabulary has a quarter of a million, so this loop makes no Python call for
        a valid string; `string` reads an invalid string again, to raise the error."""
        items: list[str] = []
        read, end, position = self._read, self._end, self.position
        try:
            for _ in range(count):
                num_bytes = int.from_bytes(read(8), "little")
                if num_bytes > MAX_STRING_BYTES or position + 8 + num_bytes > end:
                    break
                raw = read(num_bytes)
                if len(raw) != num_bytes:
                    break
                items.append(raw.decode())
                position += 8 + num_bytes
        except UnicodeDecodeError:
            pass
        self._file.seek(position)
        self.position = position
        return items + [self.string() for _ in range(count - len(items))]


def _read_counts(reader: _Reader) -> tuple[int, int]:
    if reader.take(4) != MAGIC:
        raise reader.damaged("magic_missing", "it does not begin with 'GGUF'")
    raw = reader.take(4)
    version = int.from_bytes(raw, "little")
    if version not in VERSIONS:
        is_big = int.from_bytes(raw, "big") in VERSIONS
        kind = "is big-endian" if is_big else f"has version {version}"
        message = f"expected GGUF version {VERSIONS[0]} or {VERSIONS[1]}, little-endian, but {reader.name} {kind}"
        raise CheckpointError(f"{message}; convert it again", code="big_endian" if is_big else "unsupported_version")
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
        message = f"expected the alignment to be a power of two up to {MAX_ALIGNMENT:,}, got {str(value)[:40]}"
        raise reader.damaged("invalid_alignment", message)
    return value


def _read_tensor_info(reader: _Reader, path: Path) -> tuple[str, StoredTensor]:
    """Read a tensor's name and header. The offset in the result is still relative to the start of the data."""
    name = reader.string(MAX_NAME_BYTES)
    num_dimensions = reader.u32()
    if not 1 <= num_dimensions <= MAX_DIMENSIONS:
        message = f"tensor {name[:100]!r}: expected 1 to {MAX_DIMENSIONS} dimensions, got {num_dimensions:,}"
        raise reader.damaged("invalid_num_dimensions", message)
    shape = tuple(reversed([reader.u64() for _ in range(num_dimensions)]))
    kind = tensor_type(reader.u32(), name)
    num_values = math.prod(shape)
    if num_values == 0 or shape[-1] % kind.block_values:
        message = f"expected rows of whole blocks of {kind.block_values} values, got rows of {shape[-1]:,}"
        raise reader.damaged("rows_not_whole_blocks", f"tensor {name[:100]!r} of type {kind.name}: {message}")
    num_bytes = num_values // kind.block_values * kind.block_bytes
    return name, StoredTensor(path, kind.name, shape, reader.u64(), num_bytes)


def _place_tensors(reader: _Reader, infos: list[tuple[str, StoredTensor]], alignment: int) -> dict[str, StoredTensor]:
    data_start = -(-reader.position // alignment) * alignment
    tensors: dict[str, StoredTensor] = {}
    previous_end = data_start
    for name, info in sorted(infos, key=lambda info: info[1].offset):
        offset = data_start + info.offset
        if info.offset % alignment or offset + info.num_bytes > reader.file_bytes:
            fault = f"the data of tensor {name[:100]!r} is misaligned or ends beyond the file"
            raise reader.damaged("tensor_misplaced", fault)
        if offset < previous_end:
            fault = f"the data of tensor {name[:100]!r} overlaps the data of another"
            raise reader.damaged("tensors_overlap", fault)
        if name in tensors:
            raise reader.damaged("duplicate_tensor", f"duplicate tensor {name[:100]!r}")
        previous_end = offset + info.num_bytes
        tensors[name] = replace(info, offset=offset)
    return tensors
