"""Reads the headers of safetensors files and checks that every tensor is listed once and within its file.

Does not use the safetensors library, because the fingerprint needs the unchanged header, and the format is simple: a
length, a JSON object, and data spans that cover the rest of the file without gap or overlap.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.checkpoints.stored_tensors import StoredTensor
from quire.checkpoints.strict_json import parse_json_object, read_json_object
from quire.errors import CheckpointError

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
MAX_HEADER_BYTES = 100_000_000  # the library's own limit
MAX_DIMENSIONS = 8
DTYPE_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "I16": 16, "U16": 16, "F16": 16,
    "BF16": 16, "I32": 32, "U32": 32, "F32": 32, "F64": 64, "I64": 64, "U64": 64, "C64": 64,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class WeightFile:
    """A safetensors file with a validated header."""

    path: Path
    num_bytes: int
    tensors: dict[str, StoredTensor]
    written_by: str = ""
    """The `format` in the file's metadata (pt, mlx, ...): the library whose tensor names and shapes it uses."""


def weight_paths(directory: Path) -> tuple[Path, ...]:
    """Return the weight files of a directory, sorted by name. Raises CheckpointError if there are none."""
    if (directory / INDEX_NAME).is_file():
        return tuple(directory / name for name in sorted(set(_read_index(directory).values())))
    if (directory / SINGLE_NAME).is_file():
        return (directory / SINGLE_NAME,)
    raise _missing_weights(directory)


def open_weights(directory: Path) -> tuple[WeightFile, ...]:
    """Read and validate all headers. Raises CheckpointError unless each tensor is in one file, that of the index."""
    files = tuple(read_header(path) for path in weight_paths(directory))
    file_names: dict[str, str] = {}
    for file in files:
        for name in file.tensors:
            if name in file_names:
                message = f"expected tensor {name[:100]!r} in one file, got {file_names[name]} and {file.path.name}"
                raise CheckpointError(f"{message}; download the model again", code="tensor_in_two_files")
            file_names[name] = file.path.name
    if (directory / INDEX_NAME).is_file():
        _compare_with_index(_read_index(directory), file_names)
    return files


def read_header(path: Path) -> WeightFile:
    """Read a file's header; validate the header and the length of the data. Raises CheckpointError."""
    try:
        num_bytes = path.stat().st_size
        with path.open("rb") as file:
            header_bytes = int.from_bytes(file.read(8), "little")
            if num_bytes < 8 or header_bytes > min(MAX_HEADER_BYTES, num_bytes - 8):
                sizes = f"expected a header of {header_bytes:,} bytes, got a file of {num_bytes:,} bytes"
                raise _invalid_file(path, "header_cut_off", sizes)
            raw_header = file.read(header_bytes)
    except OSError as error:
        message = f"{path} cannot be read: {error.strerror}; download the model again"
        raise CheckpointError(message, code="weights_not_readable") from error
    if not raw_header.startswith(b"{"):
        raise _invalid_file(path, "header_not_json", "its header does not begin with an object")
    header = parse_json_object(raw_header, f"the header of {path.name}")
    metadata = header.pop("__metadata__", {})
    _check_metadata(path, metadata)
    spans = [_read_entry(path, name, entry, 8 + header_bytes) for name, entry in header.items()]
    _check_spans(path, sorted((span for _, span in spans)), num_bytes - 8 - header_bytes)
    tensors = {name: entry for name, (entry, _) in zip(header, spans, strict=True)}
    return WeightFile(path, num_bytes, tensors, metadata.get("format", ""))


def _check_metadata(path: Path, metadata: Any) -> None:
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise _invalid_file(path, "invalid_metadata", "expected __metadata__ to be an object of strings")


def _read_entry(path: Path, name: str, entry: Any, data_offset: int) -> tuple[StoredTensor, tuple[int, int]]:
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise _invalid_file(path, "tensor_incomplete", f"expected dtype, shape, data_offsets of tensor {name[:100]!r}")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise _invalid_file(path, "unknown_dtype", f"tensor {name[:100]!r} has the unknown dtype {str(dtype)[:40]!r}")
    if not _are_counts(shape) or len(shape) > MAX_DIMENSIONS or not _are_counts(offsets) or len(offsets) != 2:
        message = f"expected tensor {name[:100]!r} to have a shape and two offsets of whole numbers"
        raise _invalid_file(path, "invalid_tensor_place", message)
    begin, end = offsets
    if (end - begin) * 8 != math.prod(shape) * DTYPE_BITS[dtype]:
        message = f"tensor {name[:100]!r} of shape {str(shape)[:80]} does not fill its {end - begin:,} bytes"
        raise _invalid_file(path, "wrong_tensor_size", message)
    return StoredTensor(path, dtype, tuple(shape), data_offset + begin, end - begin), (begin, end)


def _are_counts(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 2**63 for value in values)


def _check_spans(path: Path, spans: list[tuple[int, int]], data_bytes: int) -> None:
    position = 0
    for begin, end in spans:
        if begin != position:
            location = f"at byte {min(begin, position):,} of the data"
            raise _invalid_file(path, "tensors_not_adjacent", f"tensors overlap or leave a gap {location}")
        position = end
    if position != data_bytes:
        raise _invalid_file(path, "wrong_data_size", f"expected {position:,} bytes of tensor data, got {data_bytes:,}")


def _read_index(directory: Path) -> dict[str, str]:
    weight_map = read_json_object(directory / INDEX_NAME).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        message = f"expected a weight_map of tensor names to files in {INDEX_NAME}; download the model again"
        raise CheckpointError(message, code="weight_map_missing")
    for name in set(map(str, weight_map.values())):
        _check_plain_name(name)
    return {str(tensor): str(name) for tensor, name in weight_map.items()}


def _check_plain_name(name: str) -> None:
    """Raise CheckpointError unless `name` is a plain file name: no folder, drive letter or parent directory."""
    if name != Path(name).name or set(name) & set('/\\:\0"') or not name.endswith(".safetensors") or len(name) > 255:
        message = f"expected {INDEX_NAME} to name .safetensors files in its own folder, got {name[:100]!r}"
        hint = "download the model again, from a source you trust"
        raise CheckpointError(f"{message}; {hint}", code="unsafe_file_name")


def _compare_with_index(index: dict[str, str], file_names: dict[str, str]) -> None:
    for tensor in index.keys() | file_names.keys():
        if index.get(tensor) != file_names.get(tensor):
            places = f"in {index.get(tensor, 'no file')} by {INDEX_NAME}, got {file_names.get(tensor, 'no file')}"
            message = f"expected tensor {tensor[:100]!r} {places}; download the model again"
            raise CheckpointError(message, code="index_disagrees")


def _missing_weights(directory: Path) -> CheckpointError:
    unsafe_names = sorted(path.name for path in directory.iterdir() if path.suffix in {".bin", ".pt", ".pth", ".ckpt"})
    if unsafe_names:
        return CheckpointError(
            f"expected safetensors in {directory}, got {unsafe_names[0]}: opening a pickle can run any program; use "
            "a version of the model with .safetensors files, or convert it on an isolated machine",
            code="weights_pickled",
        )
    message = f"expected {SINGLE_NAME} or {INDEX_NAME} in {directory}, found neither; finish its download"
    return CheckpointError(message, code="weights_missing")


def _invalid_file(path: Path, code: str, fault: str) -> CheckpointError:
    return CheckpointError(f"{path.name} is not a valid safetensors file: {fault}; download the model again", code=code)
