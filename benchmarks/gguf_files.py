"""Writes GGUF files with the `gguf` package, with at most one tensor in memory.

Files are written atomically. The tokenizer is the test model's, padded with reserved tokens if the vocabulary is
larger.
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
"""The GGUF type of a token that only pads the list to the number of the embedding's rows."""


@dataclass(frozen=True, slots=True)
class NewTensor:
    """A tensor to be written: its GGUF type, its shape [out, in] or [size], and a function that returns its bytes."""

    name: str
    type: str
    shape: tuple[int, ...]
    make: Make
    """Returns float32 numbers for F32, and for any other type bytes, [out, bytes of a row]."""

    @property
    def num_bytes(self) -> int:
        """The tensor's bytes in the file."""
        size, block_bytes = gguf.GGML_QUANT_SIZES[self.kind]
        return int(np.prod(self.shape)) // size * block_bytes

    @property
    def kind(self) -> gguf.GGMLQuantizationType:
        """The type in the `gguf` package."""
        return gguf.GGMLQuantizationType[self.type]


@dataclass(frozen=True, slots=True)
class Value:
    """A value of a file's metadata, with its type."""

    value: Any
    type: gguf.GGUFValueType
    sub_type: gguf.GGUFValueType | None = None


Metadata = dict[str, Value]


def metadata_of(path: Path) -> Metadata:
    """Return the metadata of a file, without what the `gguf` writer adds by itself."""
    fields = gguf.GGUFReader(path).fields
    copied = {
        key: field
        for key, field in fields.items()
        if not key.startswith("GGUF.") and key != gguf.Keys.General.ARCHITECTURE
    }
    return {
        key: Value(field.contents(), *field.types[:1], *field.types[-1:][: len(field.types) - 1])
        for key, field in copied.items()
    }


def padded_tokenizer(metadata: Mapping[str, Value], num_tokens: int) -> Metadata:
    """Return the tokenizer of this metadata, padded to so many tokens."""
    tokenizer = {key: value for key, value in metadata.items() if key.startswith("tokenizer.")}
    tokens, types = tokenizer["tokenizer.ggml.tokens"], tokenizer["tokenizer.ggml.token_type"]
    missing = range(len(tokens.value), num_tokens)
    tokenizer["tokenizer.ggml.tokens"] = Value(
        [*tokens.value, *(f"<|reserved_{number}|>" for number in missing)], tokens.type, tokens.sub_type
    )
    tokenizer["tokenizer.ggml.token_type"] = Value([*types.value, *[UNUSED] * len(missing)], types.type, types.sub_type)
    return tokenizer


def write_file(
    path: Path, metadata: Mapping[str, Value], tensors: Iterable[NewTensor], architecture: str = "llama"
) -> None:
    """Write a model of this family."""
    tensors = list(tensors)
    num_bytes = sum(tensor.num_bytes for tensor in tensors)
    path.parent.mkdir(parents=True, exist_ok=True)
    _check_room(path, num_bytes)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        temporary = Path(folder) / path.name
        writer = gguf.GGUFWriter(temporary, architecture)
        for key, value in metadata.items():
            writer.add_key_value(key, value.value, value.type, value.sub_type)
        for tensor in tensors:
            writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(np.float32), tensor.num_bytes, tensor.kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for tensor in tensors:
            writer.write_tensor_data(tensor.make())
        writer.close()
        os.replace(temporary, path)


def _check_room(path: Path, num_bytes: int) -> None:
    free_bytes = shutil.disk_usage(path.parent).free
    if free_bytes < num_bytes + (1 << 30):
        raise CheckpointError(
            f"{path.name}: expected {num_bytes + (1 << 30):,} free bytes, got {free_bytes:,}; free some disk space"
        )
