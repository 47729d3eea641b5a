"""Generates a mixture of experts for speed measurements: Qwen3-30B-A3B's shape in Q4_K with some of its 48 layers.

Blocks are random and the same in every layer; routers are random too, so that rows use all experts. Its answers are
meaningless; bytes, shapes and types are those of published files.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import gguf
import numpy as np
from numpy.typing import NDArray

from benchmarks.bench_models import HEAD_TYPE, SEED, RepeatedBlocks
from benchmarks.gguf_files import Metadata, NewTensor, Value, metadata_of, padded_tokenizer, write_file
from benchmarks.record import say
from benchmarks.test_model import smollm2_file
from quire.checkpoints import cache_folder

ARCHITECTURE, TYPE = "qwen3moe", "Q4_K"
CONTEXT, THETA, NORM_EPS = 32_768, 1_000_000.0, 1e-6


@dataclass(frozen=True, slots=True)
class BenchMixture:
    """The shape of a Qwen3-MoE model."""

    layers: int
    hidden: int = 2048
    heads: int = 32
    kv_heads: int = 4
    head_size: int = 128
    experts: int = 128
    used: int = 8
    wide: int = 768
    """The intermediate size of an expert."""
    vocabulary: int = 151_936

    def matrices(self, layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield name and shape of each matrix of a layer, except its router."""
        query, kv, prefix = self.heads * self.head_size, self.kv_heads * self.head_size, f"blk.{layer}."
        yield f"{prefix}attn_q.weight", (query, self.hidden)
        yield f"{prefix}attn_k.weight", (kv, self.hidden)
        yield f"{prefix}attn_v.weight", (kv, self.hidden)
        yield f"{prefix}attn_output.weight", (self.hidden, query)
        yield f"{prefix}ffn_gate_exps.weight", (self.experts, self.wide, self.hidden)
        yield f"{prefix}ffn_up_exps.weight", (self.experts, self.wide, self.hidden)
        yield f"{prefix}ffn_down_exps.weight", (self.experts, self.hidden, self.wide)


def bench_mixture(num_layers: int) -> Path:
    """Return the file with so many layers; generate it if it does not exist."""
    path = cache_folder() / "files" / f"bench-mixture-{num_layers}-{TYPE.lower()}.gguf"
    if not path.is_file():
        say(f"making {path.name} ...")
        write_mixture(path, BenchMixture(num_layers))
    return path


def write_mixture(path: Path, shape: BenchMixture) -> None:
    """Write a file of this shape."""
    write_file(path, _metadata(shape), _tensors(shape), ARCHITECTURE)


def active_bytes(file: Path) -> int:
    """Return the bytes that a one-row step reads: every matrix but the embedding, and only the experts in use."""
    reader = gguf.GGUFReader(file)
    prefix = reader.fields["general.architecture"].contents()
    used, experts = (int(reader.fields[f"{prefix}.{key}"].contents()) for key in ("expert_used_count", "expert_count"))
    num_bytes = 0
    for tensor in reader.tensors:
        if len(tensor.shape) > 1 and tensor.name != "token_embd.weight":
            num_bytes += int(tensor.n_bytes) * used // experts if "_exps." in tensor.name else int(tensor.n_bytes)
    return num_bytes


def _metadata(shape: BenchMixture) -> Metadata:
    counts = {
        "block_count": shape.layers,
        "context_length": CONTEXT,
        "embedding_length": shape.hidden,
        "feed_forward_length": shape.wide * shape.used,
        "expert_feed_forward_length": shape.wide,
        "expert_count": shape.experts,
        "expert_used_count": shape.used,
        "attention.head_count": shape.heads,
        "attention.head_count_kv": shape.kv_heads,
        "attention.key_length": shape.head_size,
        "attention.value_length": shape.head_size,
        "vocab_size": shape.vocabulary,
    }
    numbers = {"rope.freq_base": THETA, "attention.layer_norm_rms_epsilon": NORM_EPS}
    return {
        "general.name": Value("a mixture of random weights", gguf.GGUFValueType.STRING),
        **{f"{ARCHITECTURE}.{key}": Value(value, gguf.GGUFValueType.UINT32) for key, value in counts.items()},
        **{f"{ARCHITECTURE}.{key}": Value(value, gguf.GGUFValueType.FLOAT32) for key, value in numbers.items()},
        **padded_tokenizer(metadata_of(smollm2_file()), shape.vocabulary),
    }


def _tensors(shape: BenchMixture) -> Iterator[NewTensor]:
    blocks, dice = RepeatedBlocks(), np.random.default_rng(SEED)

    def matrix(name: str, sizes: tuple[int, ...], kind: str = TYPE) -> NewTensor:
        num_out = int(np.prod(sizes[:-1]))
        return NewTensor(name, kind, sizes, partial(blocks.bytes_of, f"{name} {kind}", num_out, sizes[-1]))

    def numbers(name: str, values: NDArray[np.float32]) -> NewTensor:
        return NewTensor(name, "F32", values.shape, lambda: values)

    def ones(size: int) -> NDArray[np.float32]:
        return np.ones(size, np.float32)

    yield matrix("token_embd.weight", (shape.vocabulary, shape.hidden))
    for layer in range(shape.layers):
        for name, size in {
            "attn_norm": shape.hidden, "ffn_norm": shape.hidden,
            "attn_q_norm": shape.head_size, "attn_k_norm": shape.head_size,
        }.items():  # fmt: skip
            yield numbers(f"blk.{layer}.{name}.weight", ones(size))
        router = dice.standard_normal((shape.experts, shape.hidden), np.float32) * np.float32(shape.hidden**-0.5)
        yield numbers(f"blk.{layer}.ffn_gate_inp.weight", router)
        yield from (matrix(*each) for each in shape.matrices(layer))
    yield numbers("output_norm.weight", ones(shape.hidden))
    yield matrix("output.weight", (shape.vocabulary, shape.hidden), HEAD_TYPE)
