"""Presents a GGUF file in Hugging Face's format. Config and tokenizer are written once, to a folder of the cache.
Tensors get Hugging Face's names, but their data stays in the GGUF file and is read from there.

The folder is created atomically.
"""

import json
import struct
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

from quire.checkpoints.cache import converted_directory, put_in_place
from quire.checkpoints.directory import CONVERSION_NAME
from quire.checkpoints.families import check_shapes, expected_shapes, read_shape
from quire.checkpoints.gguf.architectures import tensor_name
from quire.checkpoints.gguf.config import (
    Metadata,
    architecture_of,
    config_of,
    generation_of,
    unsupported_model,
    with_rope_factors,
)
from quire.checkpoints.gguf.parts import GGUFParts, read_parts
from quire.checkpoints.gguf.tokenizer import write_tokenizer
from quire.checkpoints.progress import Progress
from quire.checkpoints.stored_tensors import StoredTensor, opened_weights, read_exactly
from quire.errors import CheckpointError

FORMAT_VERSION = 3
"""Part of the conversion key; increase it when the folder's content changes, so that folders are rebuilt."""
NUM_SAMPLES, SAMPLE_BYTES = 16, 64 * 1024
READ_BYTES = 16 << 20
ROPE_FACTORS = "rope_freqs.weight"
HALF_TYPES = {"F16": "float16", "BF16": "bfloat16"}


def describe_gguf(path: Path, cache: Path, progress: Progress) -> tuple[GGUFParts, Path]:
    """Return the headers of the model's files, and the folder with its config and tokenizer."""
    try:
        file = read_parts(path)
        final = converted_directory(cache, path.stem, conversion_key(file))
        if not final.is_dir():
            _write_description(file, final, progress)
        return file, final
    except OSError as error:
        message = f"cannot write the description of {path.name} to {cache}: {error.strerror or error}"
        hint = "check that the folder is writable, or set QUIRE_CACHE to another"
        raise CheckpointError(f"{message}; {hint}", code="folder_not_writable") from error


def conversion_key(file: GGUFParts) -> str:
    """Return the cache key of a file's description: a hash of header, size, mtime and samples, which is fast."""
    state = blake2b(digest_size=16, person=b"quire.gguf")
    for part in file.parts:
        state.update(struct.pack("<QQq", FORMAT_VERSION, part.file_bytes, part.modified_ns))
        with opened_weights(part.path) as source:
            state.update(read_exactly(source, 0, part.header_bytes))
            for index in range(NUM_SAMPLES):
                sample_bytes = min(SAMPLE_BYTES, part.file_bytes)
                offset = (part.file_bytes - sample_bytes) * index // (NUM_SAMPLES - 1)
                state.update(read_exactly(source, offset, sample_bytes))
    return state.hexdigest()


def plan(file: GGUFParts) -> tuple[dict[str, Any], dict[str, StoredTensor]]:
    """Return config.json and tensors by Hugging Face name. Raises CheckpointError for unexpected names or shapes."""
    metadata = Metadata(file.metadata)
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        message = "expected a matrix token_embd.weight in the GGUF file, found none; download the file again"
        raise CheckpointError(message, code="embedding_missing")
    config = config_of(metadata, {name: tensor.shape for name, tensor in file.tensors.items()})
    if ROPE_FACTORS in file.tensors:
        config = with_rope_factors(config, _small_tensor(file, ROPE_FACTORS))
    tensors = {name: tensor for name, tensor in file.tensors.items() if not _is_skipped(name, config)}
    stored = dict(_rename(file, name, tensor, config) for name, tensor in tensors.items())
    check_shapes(config, {name: tensor.shape for name, tensor in stored.items()})
    needed = expected_shapes(read_shape(config))
    for name in tensors:
        if tensor_name(config["model_type"], name) not in needed:
            raise _unexpected_tensor(name, config["model_type"])
    types = {tensor.type for tensor in stored.values() if len(tensor.shape) > 1}
    config["dtype"] = HALF_TYPES.get(types.pop() if len(types) == 1 else "", "float32")
    return config, stored


def _is_skipped(name: str, config: dict[str, Any]) -> bool:
    """Whether a tensor is not loaded: RoPE factors are in the config, and token-prediction layers are not used."""
    block, _, rest = name.partition(".")
    index = rest.partition(".")[0]
    is_extra_layer = block == "blk" and index.isdecimal() and int(index[:9]) >= config["num_hidden_layers"]
    return name == ROPE_FACTORS or (is_extra_layer and bool(config.get("num_nextn_predict_layers")))


def _rename(file: GGUFParts, old_name: str, tensor: StoredTensor, config: dict[str, Any]) -> tuple[str, StoredTensor]:
    name = tensor_name(config["model_type"], old_name)
    if name is None:
        raise _unexpected_tensor(old_name, config["model_type"])
    heads = 0
    if architecture_of(Metadata(file.metadata)).is_permuted:
        if ".q_proj." in name:
            heads = config["num_attention_heads"]
        elif ".k_proj." in name:
            heads = config["num_key_value_heads"]
    # A matrix with one row may be stored with one dimension.
    shape = (1, *tensor.shape) if name.endswith("_gate.weight") and len(tensor.shape) == 1 else tensor.shape
    return name, replace(tensor, shape=shape, rotated_heads=heads)


def _unexpected_tensor(name: str, model_type: str) -> CheckpointError:
    return unsupported_model("unexpected_tensor", f"unexpected tensor {name[:100]!r} in a {model_type} model")


def _small_tensor(file: GGUFParts, name: str) -> tuple[float, ...]:
    tensor = file.tensors[name]
    if tensor.type != "F32" or len(tensor.shape) != 1 or tensor.shape[0] > 4096:
        raise CheckpointError(f"expected {name} to hold at most 4,096 values of type F32; download the file again")
    with opened_weights(tensor.path) as source:
        return struct.unpack(f"<{tensor.shape[0]}f", read_exactly(source, tensor.offset, tensor.num_bytes))


def _write_description(file: GGUFParts, final: Path, progress: Progress) -> None:
    config, _ = plan(file)
    metadata = Metadata(file.metadata)
    num_tokens = len(file.metadata.get("tokenizer.ggml.tokens") or ())
    if num_tokens > config["vocab_size"]:
        raise CheckpointError(
            f"expected an embedding row for each of {num_tokens:,} tokens, got {config['vocab_size']:,} rows; download "
            "the file again"
        )
    generation = generation_of(metadata, num_tokens)
    config |= {key: value for key, value in generation.items() if key.endswith("_token_id")}
    with put_in_place(final) as folder:
        write_tokenizer(metadata, folder)
        digest = _digest(file, progress)
        conversion = {"format_version": FORMAT_VERSION, "source": file.path.name, "source_digest": digest}
        for name, value in {
            "config.json": config,
            "generation_config.json": generation,
            CONVERSION_NAME: conversion,
        }.items():
            (folder / name).write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _digest(file: GGUFParts, progress: Progress) -> str:
    """Return a hash of the files' whole content, which distinguishes models with equal shapes."""
    state = blake2b(digest_size=32, person=b"quire.source")
    for part in file.parts:
        with opened_weights(part.path) as source:
            for first in range(0, part.file_bytes, READ_BYTES):
                state.update(read_exactly(source, first, min(READ_BYTES, part.file_bytes - first)))
                progress(f"reading {part.path.name}", min(first + READ_BYTES, part.file_bytes), part.file_bytes)
    return state.hexdigest()
