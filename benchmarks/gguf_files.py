"""Writes GGUF files tensor by tensor, with the `gguf` package: never more in memory than one tensor.

A file appears whole or not at all. The tokenizer is the test model's, padded with reserved tokens where the vocabulary
is larger.
"""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from quire.errors import CheckpointError

Make = Callable[[], NDArray[Any]]
UNUSED = 5
"""The type of a token that only fills the list up to the embedding's rows."""


@dataclass(frozen=True, slots=True)
class NewTensor:
    """A tensor to be written: its type as GGUF spells it, its shape [out, in] or [size], and how its bytes are made."""

    name: str
    type: str
    shape: tuple[int, ...]
    make: Make
    """Float32 numbers for F32; for any other type its bytes, [out, bytes of a row]."""

    @property
    def num_bytes(self) -> int:
        """In the file."""
        size, block_bytes = gguf.GGML_QUANT_SIZES[self.kind]
        return int(np.prod(self.shape)) // size * block_bytes

    @property
    def kind(self) -> gguf.GGMLQuantizationType:
        """The package's number for the type."""
        return gguf.GGMLQuantizationType[self.type]


@dataclass(frozen=True, slots=True)
class Value:
    """A value of a file's metadata, with the type it has there."""

    value: Any
    type: gguf.GGUFValueType
    sub_type: gguf.GGUFValueType | None = None


Metadata = dict[str, Value]


def metadata_of(path: Path) -> Metadata:
    """All metadata of a file but for what every writer writes by itself."""
    fields = gguf.GGUFReader(path).fields
    kept = {
        key: field
        for key, field in fields.items()
        if not key.startswith("GGUF.") and key != gguf.Keys.General.ARCHITECTURE
    }
    return {
        key: Value(field.contents(), *field.types[:1], *field.types[-1:][: len(field.types) - 1])
        for key, field in kept.items()
    }


def padded_tokenizer(metadata: Mapping[str, Value], num_tokens: int) -> Metadata:
    """The tokenizer of this metadata with so many tokens."""
    made = {key: value for key, value in metadata.items() if key.startswith("tokenizer.")}
    tokens, types = made["tokenizer.ggml.tokens"], made["tokenizer.ggml.token_type"]
    missing = range(len(tokens.value), num_tokens)
    made["tokenizer.ggml.tokens"] = Value(
        [*tokens.value, *(f"<|reserved_{number}|>" for number in missing)], tokens.type, tokens.sub_type
    )
    made["tokenizer.ggml.token_type"] = Value([*types.value, *[UNUSED] * len(missing)], types.type, types.sub_type)
    return made


def write_file(
    path: Path, metadata: Mapping[str, Value], tensors: Iterable[NewTensor], architecture: str = "llama"
) -> None:
    """Write a model of this family."""
    tensors = list(tensors)
    num_bytes = sum(tensor.num_bytes for tensor in tensors)
    path.parent.mkdir(parents=True, exist_ok=True)
    _check_room(path, num_bytes)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        written = Path(folder) / path.name
        writer = gguf.GGUFWriter(written, architecture)
        for key, one in metadata.items():
            writer.add_key_value(key, one.value, one.type, one.sub_type)
        for tensor in tensors:
            writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(np.float32), tensor.num_bytes, tensor.kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for tensor in tensors:
            writer.write_tensor_data(tensor.make())
        writer.close()
        os.replace(written, path)


def _check_room(path: Path, num_bytes: int) -> None:
    free_bytes = shutil.disk_usage(path.parent).free
    if free_bytes < num_bytes + (1 << 30):
        raise CheckpointError(
            f"{path.name} needs {num_bytes + (1 << 30):,} free bytes, {free_bytes:,} are free; make room"
        )
