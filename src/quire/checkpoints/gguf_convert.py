"""Turns a GGUF file into a Hugging Face directory, once: the rest of quire reads one format.

Tensors are streamed a few rows at a time, so the memory needed does not grow with the model. The directory appears
whole or not at all.
"""

import json
import os
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from quire.checkpoints.cache import check_free_space, converted_directory, put_in_place
from quire.checkpoints.directory import CONVERSION_NAME
from quire.checkpoints.families import check_shapes, expected_shapes, sizes_of
from quire.checkpoints.gguf_config import Metadata, config_of, generation_of, hugging_face_name, llama3_scaling
from quire.checkpoints.gguf_file import GGUFFile, GGUFTensor, read_exactly, read_gguf
from quire.checkpoints.gguf_tokenizer import write_tokenizer
from quire.checkpoints.progress import Progress
from quire.checkpoints.weights import SINGLE_NAME
from quire.errors import CheckpointError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

FORMAT_VERSION = 1
"""Part of the key: raise it when a conversion's outcome changes, and old ones are made anew."""
NUM_SAMPLES, SAMPLE_BYTES = 16, 64 * 1024
SLICE_VALUES = 2 * 1024 * 1024
"""Values handled at once: 8 MiB as 32-bit floats, about 40 MiB with the dequantiser's temporaries."""
ROPE_FACTORS = "rope_freqs.weight"
KEPT_TYPES = {"F16": ("F16", 2), "BF16": ("BF16", 2)}


@dataclass(frozen=True, slots=True)
class Move:
    """One tensor on its way: where it comes from, what it is called there, and how its rows are ordered."""

    tensor: GGUFTensor
    name: str
    dtype: str
    value_bytes: int
    rotated_heads: int
    """How many heads' rows GGUF keeps in interleaved order; 0 if the rows need no reordering."""

    @property
    def out_bytes(self) -> int:
        """Bytes of the converted tensor."""
        return self.tensor.num_rows * self.tensor.shape[-1] * self.value_bytes


def converted(path: Path, cache: Path, progress: Progress) -> Path:
    """The directory this GGUF file was or now is converted into."""
    try:
        file = read_gguf(path)
        final = converted_directory(cache, path.stem, conversion_key(file))
        if not final.is_dir():
            _convert(file, final, progress)
        return final
    except OSError as error:
        raise CheckpointError(
            f"{path.name} cannot be converted into {cache}: {error.strerror or error}; check that the folder can be "
            "written to, or set QUIRE_CACHE to another"
        ) from error


def conversion_key(file: GGUFFile) -> str:
    """Names a conversion by its source: header, size, time of change, and samples, since hashing all takes too long."""
    state = blake2b(digest_size=16, person=b"quire.gguf")
    state.update(struct.pack("<QQq", FORMAT_VERSION, file.file_bytes, file.modified_ns))
    with file.opened() as source:
        state.update(read_exactly(source, 0, file.header_bytes))
        for index in range(NUM_SAMPLES):
            sample_bytes = min(SAMPLE_BYTES, file.file_bytes)
            offset = (file.file_bytes - sample_bytes) * index // (NUM_SAMPLES - 1)
            state.update(read_exactly(source, offset, sample_bytes))
    return state.hexdigest()


def plan(file: GGUFFile) -> tuple[dict[str, Any], list[Move]]:
    """config.json and the moves to make, with every tensor's name and shape checked against the metadata."""
    metadata = Metadata(file.metadata)
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise CheckpointError(
            "a GGUF model must have the matrix token_embd.weight and has not; download the file again"
        )
    config = config_of(metadata, embedding.shape[0], tied="output.weight" not in file.tensors)
    if ROPE_FACTORS in file.tensors and (scaling := llama3_scaling(config, _small_tensor(file, ROPE_FACTORS))):
        config["rope_scaling"] = scaling
    moves = [_move(tensor, metadata, config) for name, tensor in file.tensors.items() if name != ROPE_FACTORS]
    check_shapes(config, {move.name: move.tensor.shape for move in moves})
    needed = expected_shapes(config["model_type"], sizes_of(config))
    for move in moves:
        if move.name not in needed:
            raise _no_place(move.tensor.name, config["model_type"])
    matrices = {move.dtype for move in moves if len(move.tensor.shape) > 1}
    config["dtype"] = {"F16": "float16", "BF16": "bfloat16"}.get(
        matrices.pop() if len(matrices) == 1 else "", "float32"
    )
    # Wide values first, so that every tensor is aligned for its type; then as they lie in the source.
    return config, sorted(moves, key=lambda move: (-move.value_bytes, move.tensor.offset))


def _move(tensor: GGUFTensor, metadata: Metadata, config: dict[str, Any]) -> Move:
    name = hugging_face_name(tensor.name)
    if name is None:
        raise _no_place(tensor.name, config["model_type"])
    dtype, value_bytes = KEPT_TYPES.get(tensor.type.name, ("F32", 4))
    heads = 0
    if metadata.architecture == "llama":  # the other architectures keep Hugging Face's order of rows
        if ".q_proj." in name:
            heads = config["num_attention_heads"]
        elif ".k_proj." in name:
            heads = config["num_key_value_heads"]
    return Move(tensor, name, dtype, value_bytes, heads)


def _no_place(name: str, model_type: str) -> CheckpointError:
    return CheckpointError(
        f"tensor {name[:100]!r} has no place in a {model_type} model that quire runs; "
        "use the model's safetensors instead"
    )


def _small_tensor(file: GGUFFile, name: str) -> tuple[float, ...]:
    tensor = file.tensors[name]
    if tensor.type.name != "F32" or len(tensor.shape) != 1 or tensor.shape[0] > 4096:
        raise CheckpointError(f"{name} must be up to 4,096 values of type F32 and is not; download the file again")
    with file.opened() as source:
        return struct.unpack(f"<{tensor.shape[0]}f", read_exactly(source, tensor.offset, tensor.num_bytes))


def _convert(file: GGUFFile, final: Path, progress: Progress) -> None:
    config, moves = plan(file)
    metadata = Metadata(file.metadata)
    num_tokens = len(file.metadata.get("tokenizer.ggml.tokens") or ())
    if num_tokens > config["vocab_size"]:
        raise CheckpointError(
            f"the tokenizer has {num_tokens:,} tokens and the embedding {config['vocab_size']:,} rows; "
            "download the file again"
        )
    generation = generation_of(metadata, num_tokens)
    config |= {key: value for key, value in generation.items() if key.endswith("_token_id")}
    with put_in_place(final) as folder:
        check_free_space(folder, sum(move.out_bytes for move in moves))
        write_tokenizer(metadata, folder)
        digest = _write_weights(file, moves, folder / SINGLE_NAME, progress)
        conversion = {"format_version": FORMAT_VERSION, "source": file.path.name, "source_digest": digest}
        for name, value in {
            "config.json": config,
            "generation_config.json": generation,
            CONVERSION_NAME: conversion,
        }.items():
            (folder / name).write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _write_weights(file: GGUFFile, moves: list[Move], path: Path, progress: Progress) -> str:
    """Write the safetensors file; returns the digest of all that was read."""
    label = f"converting {file.path.name}"
    total_bytes = sum(move.out_bytes for move in moves)
    done_bytes = 0
    state = blake2b(digest_size=32, person=b"quire.source")
    with file.opened() as source, path.open("wb") as out:
        state.update(read_exactly(source, 0, file.header_bytes))
        out.write(_safetensors_header(moves))
        for move in moves:
            for piece in _converted_pieces(source, move, state.update):
                out.write(piece)
                done_bytes += piece.nbytes
                progress(label, done_bytes, total_bytes)
        out.flush()
        os.fsync(
            out.fileno()
        )  # the folder is renamed next: a name must not outlive a power cut that its content did not
    return state.hexdigest()


def _safetensors_header(moves: list[Move]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for move in moves:
        offsets = [position, position + move.out_bytes]
        entries[move.name] = {"dtype": move.dtype, "shape": list(move.tensor.shape), "data_offsets": offsets}
        position = offsets[1]
    raw = json.dumps(entries, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    return struct.pack("<Q", len(raw)) + raw


def _converted_pieces(source: BinaryIO, move: Move, seen: Callable[[bytes], None]) -> Iterator[memoryview]:
    """The tensor's rows in their new order and type, a few at a time."""
    import numpy as np

    tensor = move.tensor
    for first, num_rows in _slices(move):
        raw = read_exactly(source, tensor.offset + first * tensor.row_bytes, num_rows * tensor.row_bytes)
        seen(raw)
        rows = np.frombuffer(raw, np.uint8).reshape(num_rows, tensor.row_bytes)
        if move.rotated_heads:
            rows = half_split(rows, tensor.num_rows // move.rotated_heads)
        values = _values(rows, tensor)
        yield np.ascontiguousarray(values).data.cast("B")


def _slices(move: Move) -> Iterator[tuple[int, int]]:
    """First row and number of rows of each slice; heads whose rows are reordered are kept whole."""
    num_rows = move.tensor.num_rows
    unit = num_rows // move.rotated_heads if move.rotated_heads else 1
    step = max(1, SLICE_VALUES // (move.tensor.shape[-1] * unit)) * unit
    for first in range(0, num_rows, step):
        yield first, min(step, num_rows - first)


def half_split(rows: "NDArray[np.uint8]", head_dim: int) -> "NDArray[np.uint8]":
    """Put the rows of each head back from GGUF's order (0, half, 1, half + 1, ...) into 0, 1, ..., head_dim - 1.

    GGUF rotates neighbouring rows with each other, Hugging Face row i with row i + half, half being head_dim / 2.
    """
    num_rows, row_bytes = rows.shape
    pairs = rows.reshape(num_rows // head_dim, head_dim // 2, 2, row_bytes)
    return pairs.swapaxes(1, 2).reshape(num_rows, row_bytes)


def _values(rows: "NDArray[np.uint8]", tensor: GGUFTensor) -> "NDArray[Any]":
    """The rows as the numbers that go into the new file, all of them finite."""
    import numpy as np
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    values: NDArray[Any]
    if tensor.type.name in KEPT_TYPES:
        values = np.ascontiguousarray(rows).view(np.uint16)
        exponent = 0x7C00 if tensor.type.name == "F16" else 0x7F80
        finite = bool(((values & exponent) != exponent).all())
    else:
        with np.errstate(all="ignore"):
            values = dequantize(np.ascontiguousarray(rows), GGMLQuantizationType[tensor.type.name])
            finite = bool(np.isfinite(values).all())
    if not finite:
        raise CheckpointError(f"tensor {tensor.name!r} holds NaN or infinity; download the file again")
    return values
