"""Models of a few kilobytes, as GGUF files and as Hugging Face directories, made when a test needs them."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file
from tokenizers.pre_tokenizers import ByteLevel

from quire.checkpoints import Checkpoint, resolve
from quire.checkpoints.directory import read_directory
from quire.checkpoints.gguf.convert import ensure_safetensors
from tests.support.models.gguf_blocks import random_rows

Array = NDArray[Any]
WORDS = ["h e", "l l", "he ll", "hell o", "Ġ w", "1 2"]
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"


@dataclass(frozen=True)
class Tiny:
    """What a tiny model is like; `metadata` adds to the file's keys, and a None removes one."""

    arch: str = "llama"
    hidden: int = 32
    intermediate: int = 32
    num_layers: int = 1
    num_heads: int = 4
    num_kv_heads: int = 2
    kind: str = "F32"
    kinds: Mapping[str, str] = field(default_factory=dict)
    """Of matrices that are not of `kind`, by the part of their name before `.weight`: attn_v, output, ..."""
    tied: bool = True
    seed: int = 0
    metadata: Mapping[str, Any] = field(default_factory=dict)
    tensors: Mapping[str, Array | None] = field(default_factory=dict)

    @property
    def head_dim(self) -> int:
        return self.hidden // self.num_heads


TINY = Tiny()


def byte_alphabet() -> list[str]:
    """The 256 characters that stand for bytes in byte-level BPE."""
    return sorted(ByteLevel.alphabet())


def byte_level_metadata(pre: str = "smollm") -> dict[str, Any]:
    tokens = [*SPECIAL, *byte_alphabet(), *(merge.replace(" ", "") for merge in WORDS), "<tool>"]
    types = [3] * len(SPECIAL) + [1] * (len(tokens) - len(SPECIAL) - 1) + [4]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": list(WORDS),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": TEMPLATE,
    }


def piece_metadata() -> dict[str, Any]:
    """A SentencePiece vocabulary: <unk>, <s>, </s>, 256 bytes, letters, then pieces by falling score."""
    pieces = ["▁h", "el", "lo", "▁hel", "▁hello", "▁w", "or"]
    letters = ["▁", *"abcdefghijklmnopqrstuvwxyz"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces, *letters]
    scores = [0.0] * 259 + [-float(rank) for rank in range(len(pieces))] + [-1000.0 - i for i in range(len(letters))]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * (len(pieces) + len(letters)),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


def all_metadata(tiny: Tiny) -> dict[str, Any]:
    arch = tiny.arch
    base: dict[str, Any] = {
        f"{arch}.block_count": tiny.num_layers,
        f"{arch}.context_length": 128,
        f"{arch}.embedding_length": tiny.hidden,
        f"{arch}.feed_forward_length": tiny.intermediate,
        f"{arch}.attention.head_count": tiny.num_heads,
        f"{arch}.attention.head_count_kv": tiny.num_kv_heads,
        f"{arch}.attention.layer_norm_rms_epsilon": 1e-5,
        f"{arch}.rope.freq_base": 10000.0,
    }
    if "tokenizer.ggml.model" not in tiny.metadata:
        base |= byte_level_metadata()
    return {key: value for key, value in (base | dict(tiny.metadata)).items() if value is not None}


def raw_tensor(kind: str, shape: tuple[int, ...], dice: np.random.Generator) -> Array:
    """Values of this type as they lie in a file. The package cannot quantise K types, so theirs are drawn as bytes."""
    number = GGMLQuantizationType[kind]
    if kind in {"Q4_K", "Q6_K"}:
        block_bytes = gguf.GGML_QUANT_SIZES[number][1]
        blocks = dice.integers(0, 256, (*shape[:-1], shape[-1] // 256, block_bytes), dtype=np.uint8)
        scale = np.frombuffer(np.float16(0.01).tobytes(), np.uint8)
        for place in (0, 2) if kind == "Q4_K" else (208,):
            blocks[..., place : place + 2] = scale
        return blocks.reshape(*shape[:-1], -1)
    if kind in {"Q5_K", "IQ4_NL", "IQ4_XS", "MXFP4", "Q2_K", "Q3_K"}:
        return random_rows(kind, shape[0], shape[1], dice)
    values = dice.standard_normal(shape, dtype=np.float32)
    return np.asarray(quantize(values, number))


def tensor_shapes(tiny: Tiny, num_tokens: int) -> dict[str, tuple[int, ...]]:
    query, key = tiny.num_heads * tiny.head_dim, tiny.num_kv_heads * tiny.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (num_tokens, tiny.hidden),
        "output_norm.weight": (tiny.hidden,),
    }
    if not tiny.tied:
        shapes["output.weight"] = (num_tokens, tiny.hidden)
    for layer in range(tiny.num_layers):
        shapes |= {
            f"blk.{layer}.{name}": shape
            for name, shape in {
                "attn_norm.weight": (tiny.hidden,),
                "attn_q.weight": (query, tiny.hidden),
                "attn_k.weight": (key, tiny.hidden),
                "attn_v.weight": (key, tiny.hidden),
                "attn_output.weight": (tiny.hidden, query),
                "ffn_norm.weight": (tiny.hidden,),
                "ffn_gate.weight": (tiny.intermediate, tiny.hidden),
                "ffn_up.weight": (tiny.intermediate, tiny.hidden),
                "ffn_down.weight": (tiny.hidden, tiny.intermediate),
            }.items()
        }
        if tiny.arch == "qwen2":
            shapes |= {
                f"blk.{layer}.attn_{part}.bias": (size,) for part, size in zip("qkv", (query, key, key), strict=True)
            }
        if tiny.arch == "qwen3":
            shapes |= {f"blk.{layer}.attn_{part}_norm.weight": (tiny.head_dim,) for part in "qk"}
    return shapes


def write_gguf(path: Path, tiny: Tiny = TINY) -> Path:
    """Write the model; norms and biases are F32, matrices of `tiny.kind`."""
    metadata = all_metadata(tiny)
    writer = GGUFWriter(path, str(metadata.pop("general.architecture", tiny.arch)))
    for key, value in metadata.items():
        add_field(writer, key, value)
    dice = np.random.default_rng(tiny.seed)
    for name, shape in tensor_shapes(tiny, len(metadata["tokenizer.ggml.tokens"])).items():
        if name in tiny.tensors:
            continue
        kind = tiny.kinds.get(name.split(".")[-2], tiny.kind) if len(shape) > 1 else "F32"
        writer.add_tensor(name, raw_tensor(kind, shape, dice), raw_dtype=GGMLQuantizationType[kind])
    for name, values in tiny.tensors.items():
        if values is not None:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_field(writer: GGUFWriter, key: str, value: Any) -> None:
    """A field of the header, by the type of its value."""
    match value:
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case _:
            writer.add_array(key, value)


def make_directory(folder: Path, *, num_shards: int = 2, tiny: Tiny = TINY) -> Path:
    """A Hugging Face directory: a converted tiny model, its weights dealt out to shards with an index."""
    folder.mkdir(parents=True, exist_ok=True)
    made = converted_tiny(folder, tiny)
    tensors = load_file(made.weight_files[0])
    for path in made.directory.iterdir():
        if path.suffix != ".safetensors" and path.name != "quire.json":
            (folder / path.name).write_bytes(path.read_bytes())
    names = sorted(tensors)
    weight_map: dict[str, str] = {}
    for shard in range(num_shards):
        file = f"model-{shard + 1:05}-of-{num_shards:05}.safetensors" if num_shards > 1 else "model.safetensors"
        part = {name: tensors[name] for name in names[shard::num_shards]}
        save_file(part, folder / file)
        weight_map |= dict.fromkeys(part, file)
    if num_shards > 1:
        index = {"metadata": {}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    generation = {"eos_token_id": [2], "temperature": 0.6, "top_k": 40, "top_p": 0.9}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


def converted_tiny(scratch: Path, tiny: Tiny) -> Checkpoint:
    """A tiny model that has gone through GGUF and conversion, kept outside `scratch` in a folder beside it."""
    beside = scratch.parent / f"{scratch.name}-source"
    beside.mkdir(parents=True, exist_ok=True)
    return converted(resolve(str(write_gguf(beside / "tiny.gguf", tiny)), cache=beside / "cache"))


def converted(checkpoint: Checkpoint) -> Checkpoint:
    """The same model with its weights as safetensors."""
    return read_directory(ensure_safetensors(checkpoint), checkpoint.name)
