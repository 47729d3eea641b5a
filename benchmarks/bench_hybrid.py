"""Generates a hybrid for speed measurements: Qwen3-Next's shape in Q4_K with some of its 48 layers.

Blocks are random and the same in every layer, as in `bench_mixture`; decays and steps are chosen such that states
neither grow nor vanish at once. Its answers are meaningless; bytes, shapes and types are those of published files.
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

ARCHITECTURE, TYPE = "qwen3next", "Q4_K"
CONTEXT, THETA, NORM_EPS = 32_768, 10_000_000.0, 1e-6
TAPS, FULL_EVERY = 4, 4


@dataclass(frozen=True, slots=True)
class BenchHybrid:
    """The shape of a Qwen3-Next model."""

    layers: int
    hidden: int = 2048
    heads: int = 16
    kv_heads: int = 2
    head_size: int = 256
    rotated: int = 64
    key_heads: int = 16
    value_heads: int = 32
    state_size: int = 128
    """The two sizes of a head's state matrix."""
    experts: int = 512
    used: int = 10
    wide: int = 512
    """The intermediate size of an expert, and of the shared expert."""
    vocabulary: int = 151_936

    @property
    def inner(self) -> int:
        """The total size of all value heads."""
        return self.value_heads * self.state_size

    @property
    def channels(self) -> int:
        """The number of convolved channels."""
        return 2 * self.key_heads * self.state_size + self.inner

    def is_full(self, layer: int) -> bool:
        """Whether the layer has full attention."""
        return (layer + 1) % FULL_EVERY == 0

    def matrices(self, layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield name and shape of each 4-bit matrix of a layer."""
        prefix, query, kv = f"blk.{layer}.", self.heads * self.head_size, self.kv_heads * self.head_size
        if self.is_full(layer):
            yield f"{prefix}attn_q.weight", (2 * query, self.hidden)
            yield f"{prefix}attn_k.weight", (kv, self.hidden)
            yield f"{prefix}attn_v.weight", (kv, self.hidden)
            yield f"{prefix}attn_output.weight", (self.hidden, query)
        else:
            yield f"{prefix}attn_qkv.weight", (self.channels, self.hidden)
            yield f"{prefix}attn_gate.weight", (self.inner, self.hidden)
            yield f"{prefix}ssm_ba.weight", (2 * self.value_heads, self.hidden)
            yield f"{prefix}ssm_out.weight", (self.hidden, self.inner)
        for kind, shape in {
            "gate": (self.wide, self.hidden), "up": (self.wide, self.hidden), "down": (self.hidden, self.wide)
        }.items():  # fmt: skip
            yield f"{prefix}ffn_{kind}_exps.weight", (self.experts, *shape)
            yield f"{prefix}ffn_{kind}_shexp.weight", shape

    def numbers(self, layer: int) -> Iterator[tuple[str, NDArray[np.float32]]]:
        """Yield the 32-bit tensors of a layer."""
        dice = np.random.default_rng(SEED + layer)

        def normal(*sizes: int) -> NDArray[np.float32]:
            return dice.standard_normal(sizes, np.float32)

        small = np.float32(self.hidden**-0.5)
        yield "attn_norm.weight", np.ones(self.hidden, np.float32)
        yield "post_attention_norm.weight", np.ones(self.hidden, np.float32)
        yield "ffn_gate_inp.weight", normal(self.experts, self.hidden) * small
        yield "ffn_gate_inp_shexp.weight", normal(1, self.hidden) * small
        if self.is_full(layer):
            yield "attn_q_norm.weight", np.ones(self.head_size, np.float32)
            yield "attn_k_norm.weight", np.ones(self.head_size, np.float32)
        else:
            yield "ssm_conv1d.weight", normal(self.channels, TAPS) * np.float32(0.5)
            yield "ssm_dt.bias", np.full(self.value_heads, -4.0, np.float32)
            yield "ssm_a", -dice.uniform(0.5, 8.0, self.value_heads).astype(np.float32)
            yield "ssm_norm.weight", np.ones(self.state_size, np.float32)


def bench_hybrid(num_layers: int) -> Path:
    """Return the file with so many layers; generate it if it does not exist."""
    path = cache_folder() / "files" / f"bench-hybrid-{num_layers}-{TYPE.lower()}.gguf"
    if not path.is_file():
        say(f"making {path.name} ...")
        shape = BenchHybrid(num_layers)
        write_file(path, _metadata(shape), _tensors(shape), ARCHITECTURE)
    return path


def _metadata(shape: BenchHybrid) -> Metadata:
    counts = {
        "block_count": shape.layers, "context_length": CONTEXT, "embedding_length": shape.hidden,
        "feed_forward_length": shape.wide * shape.used, "expert_feed_forward_length": shape.wide,
        "expert_shared_feed_forward_length": shape.wide, "expert_count": shape.experts,
        "expert_used_count": shape.used, "attention.head_count": shape.heads,
        "attention.head_count_kv": shape.kv_heads, "attention.key_length": shape.head_size,
        "attention.value_length": shape.head_size, "rope.dimension_count": shape.rotated,
        "ssm.conv_kernel": TAPS, "ssm.state_size": shape.state_size, "ssm.group_count": shape.key_heads,
        "ssm.time_step_rank": shape.value_heads, "ssm.inner_size": shape.inner, "full_attention_interval": FULL_EVERY,
        "vocab_size": shape.vocabulary,
    }  # fmt: skip
    numbers = {"rope.freq_base": THETA, "attention.layer_norm_rms_epsilon": NORM_EPS}
    return {
        "general.name": Value("a hybrid of random weights", gguf.GGUFValueType.STRING),
        **{f"{ARCHITECTURE}.{key}": Value(value, gguf.GGUFValueType.UINT32) for key, value in counts.items()},
        **{f"{ARCHITECTURE}.{key}": Value(value, gguf.GGUFValueType.FLOAT32) for key, value in numbers.items()},
        **padded_tokenizer(metadata_of(smollm2_file()), shape.vocabulary),
    }


def _tensors(shape: BenchHybrid) -> Iterator[NewTensor]:
    blocks = RepeatedBlocks()

    def matrix(name: str, sizes: tuple[int, ...], kind: str = TYPE) -> NewTensor:
        num_out = int(np.prod(sizes[:-1]))
        return NewTensor(name, kind, sizes, partial(blocks.bytes_of, f"{name} {kind}", num_out, sizes[-1]))

    def numbers(name: str, values: NDArray[np.float32]) -> NewTensor:
        return NewTensor(name, "F32", values.shape, lambda: values)

    yield matrix("token_embd.weight", (shape.vocabulary, shape.hidden))
    for layer in range(shape.layers):
        yield from (numbers(f"blk.{layer}.{name}", values) for name, values in shape.numbers(layer))
        yield from (matrix(*each) for each in shape.matrices(layer))
    yield numbers("output_norm.weight", np.ones(shape.hidden, np.float32))
    yield matrix("output.weight", (shape.vocabulary, shape.hidden), HEAD_TYPE)
