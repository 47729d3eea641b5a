"""What a GGUF file is to the rest of quire: config and tokenizer as files that Hugging Face knows, written once into a
small folder of the cache; and its tensors by Hugging Face's names, where they lie.

The folder appears whole or not at all. Weights stay in the file.
"""

import json
import struct
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
from quire.checkpoints.gguf.file import GGUFTensor, opened_gguf, read_exactly
from quire.checkpoints.gguf.parts import GGUFParts, read_parts
from quire.checkpoints.gguf.tokenizer import write_tokenizer
from quire.checkpoints.progress import Progress
from quire.checkpoints.stored_tensors import StoredTensor
from quire.errors import CheckpointError

FORMAT_VERSION = 3
"""Part of the key: raise it when a folder's content changes, and old ones are made anew."""
NUM_SAMPLES, SAMPLE_BYTES = 16, 64 * 1024
READ_BYTES = 16 << 20
ROPE_FACTORS = "rope_freqs.weight"
HALF_TYPES = {"F16": "float16", "BF16": "bfloat16"}


def gguf_described(path: Path, cache: Path, progress: Progress) -> tuple[GGUFParts, Path]:
    """The headers of the model's files, and the folder with its config and tokenizer."""
    try:
        file = read_parts(path)
        final = converted_directory(cache, path.stem, conversion_key(file))
        if not final.is_dir():
            _describe(file, final, progress)
        return file, final
    except OSError as error:
        why = f"cannot write the description of {path.name} to {cache}: {error.strerror or error}"
        way_out = "check that the folder is writable, or set QUIRE_CACHE to another"
        raise CheckpointError(f"{why}; {way_out}", code="folder_not_writable") from error


def conversion_key(file: GGUFParts) -> str:
    """Names a conversion by its source: header, size, time of change, and samples, since hashing all takes too long."""
    state = blake2b(digest_size=16, person=b"quire.gguf")
    for part in file.parts:
        state.update(struct.pack("<QQq", FORMAT_VERSION, part.file_bytes, part.modified_ns))
        with opened_gguf(part.path) as source:
            state.update(read_exactly(source, 0, part.header_bytes))
            for index in range(NUM_SAMPLES):
                sample_bytes = min(SAMPLE_BYTES, part.file_bytes)
                offset = (part.file_bytes - sample_bytes) * index // (NUM_SAMPLES - 1)
                state.update(read_exactly(source, offset, sample_bytes))
    return state.hexdigest()


def plan(file: GGUFParts) -> tuple[dict[str, Any], dict[str, StoredTensor]]:
    """config.json and the tensors by their new names, every name and shape checked against the metadata."""
    metadata = Metadata(file.metadata)
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        missing = "expected a matrix token_embd.weight in the GGUF file, found none; download the file again"
        raise CheckpointError(missing, code="embedding_missing")
    config = config_of(metadata, {name: tensor.shape for name, tensor in file.tensors.items()})
    if ROPE_FACTORS in file.tensors:
        config = with_rope_factors(config, _small_tensor(file, ROPE_FACTORS))
    tensors = [tensor for name, tensor in file.tensors.items() if not _is_passed_over(name, config)]
    stored = dict(_stored(file, tensor, config) for tensor in tensors)
    check_shapes(config, {name: tensor.shape for name, tensor in stored.items()})
    needed = expected_shapes(read_shape(config))
    for tensor in tensors:
        if tensor_name(config["model_type"], tensor.name) not in needed:
            raise _no_place(tensor.name, config["model_type"])
    types = {tensor.type for tensor in stored.values() if len(tensor.shape) > 1}
    config["dtype"] = HALF_TYPES.get(types.pop() if len(types) == 1 else "", "float32")
    return config, stored


def _is_passed_over(name: str, config: dict[str, Any]) -> bool:
    """RoPE's factors are in the config; layers behind the last, which guess tokens, are not needed."""
    block, _, rest = name.partition(".")
    index = rest.partition(".")[0]
    is_behind = block == "blk" and index.isdecimal() and int(index[:9]) >= config["num_hidden_layers"]
    return name == ROPE_FACTORS or (is_behind and bool(config.get("num_nextn_predict_layers")))


def _stored(file: GGUFParts, tensor: GGUFTensor, config: dict[str, Any]) -> tuple[str, StoredTensor]:
    name = tensor_name(config["model_type"], tensor.name)
    if name is None:
        raise _no_place(tensor.name, config["model_type"])
    heads = 0
    if architecture_of(Metadata(file.metadata)).is_permuted:
        if ".q_proj." in name:
            heads = config["num_attention_heads"]
        elif ".k_proj." in name:
            heads = config["num_key_value_heads"]
    # A matrix of one row may have lost a dimension.
    shape = (1, *tensor.shape) if name.endswith("_gate.weight") and len(tensor.shape) == 1 else tensor.shape
    place = (tensor.type.name, shape, tensor.offset, tensor.num_bytes)
    return name, StoredTensor(tensor.path, *place, rotated_heads=heads)


def _no_place(name: str, model_type: str) -> CheckpointError:
    return unsupported_model("unexpected_tensor", f"unexpected tensor {name[:100]!r} in a {model_type} model")


def _small_tensor(file: GGUFParts, name: str) -> tuple[float, ...]:
    tensor = file.tensors[name]
    if tensor.type.name != "F32" or len(tensor.shape) != 1 or tensor.shape[0] > 4096:
        raise CheckpointError(f"expected {name} to hold at most 4,096 values of type F32; download the file again")
    with opened_gguf(tensor.path) as source:
        return struct.unpack(f"<{tensor.shape[0]}f", read_exactly(source, tensor.offset, tensor.num_bytes))


def _describe(file: GGUFParts, final: Path, progress: Progress) -> None:
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
    """Of all that is in the files: two of equal shapes differ in nothing else."""
    state = blake2b(digest_size=32, person=b"quire.source")
    for part in file.parts:
        with opened_gguf(part.path) as source:
            for first in range(0, part.file_bytes, READ_BYTES):
                state.update(read_exactly(source, first, min(READ_BYTES, part.file_bytes - first)))
                progress(f"reading {part.path.name}", min(first + READ_BYTES, part.file_bytes), part.file_bytes)
    return state.hexdigest()
