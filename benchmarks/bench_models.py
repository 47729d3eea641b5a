"""Generates models for speed measurements in the cache folder: `make bench-models` prints their files.

    1b   Llama-3.2-1B's shape in Q4_0, quantised by the `gguf` package from a seed
    8b   Llama-3.1-8B's shape in Q4_K, the head in Q6_K: random codes and plausible scales, the same in every layer,
         because the package cannot quantise K-formats
    smollm2_as("Q8_0")   the test model's own weights in another type

Their answers are meaningless; bytes, shapes and types are those of published files. Existing files are not generated
again.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import gguf
import numpy as np
from gguf import quants
from numpy.typing import NDArray

from benchmarks.gguf_files import Metadata, NewTensor, Value, metadata_of, padded_tokenizer, write_file
from benchmarks.record import say
from benchmarks.test_model import smollm2_file
from quire.checkpoints import cache_folder

SEED = 20
VOCABULARY = 128_256
CONTEXT, ORIGINAL_CONTEXT = 131_072, 8_192
THETA, LOW, HIGH = 500_000.0, 1.0, 4.0
NORM_EPS = 1e-5

Bytes = NDArray[np.uint8]
Weights = Callable[[str, int, int], Bytes]
"""Returns the bytes of a matrix, by its name, outputs and inputs."""


@dataclass(frozen=True, slots=True)
class LlamaShape:
    """The shape of a Llama 3 model."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    wide: int
    rope_factor: float
    is_tied: bool

    def matrices(self, layer: int) -> Iterator[tuple[str, int, int]]:
        """Yield name, outputs and inputs of each matrix of a layer."""
        query, kv, prefix = self.heads * self.head_size, self.kv_heads * self.head_size, f"blk.{layer}."
        yield f"{prefix}attn_q.weight", query, self.hidden
        yield f"{prefix}attn_k.weight", kv, self.hidden
        yield f"{prefix}attn_v.weight", kv, self.hidden
        yield f"{prefix}attn_output.weight", self.hidden, query
        yield f"{prefix}ffn_gate.weight", self.wide, self.hidden
        yield f"{prefix}ffn_up.weight", self.wide, self.hidden
        yield f"{prefix}ffn_down.weight", self.hidden, self.wide


SHAPES = {
    "1b": LlamaShape(2048, 16, 32, 8, 64, 8192, 32.0, is_tied=True),
    "8b": LlamaShape(4096, 32, 32, 8, 128, 14336, 8.0, is_tied=False),
}
TYPES = {"1b": "Q4_0", "8b": "Q4_K"}
HEAD_TYPE = "Q6_K"
"""The type of a head that is not the embedding, as in published files."""


def bench_model(name: str) -> Path:
    """Return the file of the model `1b` or `8b`; generate it if it does not exist."""
    path = cache_folder() / "files" / f"bench-{name}-{TYPES[name].lower()}.gguf"
    if not path.is_file():
        say(f"making {path.name} ...")
        make = quantised if name == "1b" else RepeatedBlocks().bytes_of
        write_file(path, _metadata(name), _tensors(SHAPES[name], TYPES[name], make))
    return path


def smollm2_as(type_name: str) -> Path:
    """Return the test model with every matrix in this type, quantised from the numbers in its 4-bit file."""
    path = cache_folder() / "files" / f"SmolLM2-135M-Instruct.from-Q4_1.{type_name}.gguf"
    if not path.is_file():
        source = smollm2_file()
        tensors = [_converted(tensor, type_name) for tensor in gguf.GGUFReader(source).tensors]
        write_file(path, metadata_of(source), tensors)
    return path


def _converted(tensor: gguf.ReaderTensor, type_name: str) -> NewTensor:
    shape = tuple(int(size) for size in reversed(tensor.shape))
    kind = gguf.GGMLQuantizationType[type_name if len(shape) > 1 else "F32"]

    def make() -> NDArray[np.generic]:
        return quants.quantize(quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32), kind)

    return NewTensor(tensor.name, kind.name, shape, make)


# -- metadata and tensors ----------------------------------------------------------------------------------------------


def _metadata(name: str) -> Metadata:
    shape, tokenizer = SHAPES[name], padded_tokenizer(metadata_of(smollm2_file()), VOCABULARY)
    counts = {
        "block_count": shape.layers,
        "context_length": CONTEXT,
        "embedding_length": shape.hidden,
        "feed_forward_length": shape.wide,
        "attention.head_count": shape.heads,
        "attention.head_count_kv": shape.kv_heads,
        "rope.dimension_count": shape.head_size,
        "vocab_size": VOCABULARY,
    }
    numbers = {"rope.freq_base": THETA, "attention.layer_norm_rms_epsilon": NORM_EPS}
    return {
        "general.name": Value(f"Llama 3 {name} of random weights", gguf.GGUFValueType.STRING),
        **{f"llama.{key}": Value(value, gguf.GGUFValueType.UINT32) for key, value in counts.items()},
        **{f"llama.{key}": Value(value, gguf.GGUFValueType.FLOAT32) for key, value in numbers.items()},
        **tokenizer,
    }


def _tensors(shape: LlamaShape, type_name: str, make: Weights) -> Iterator[NewTensor]:
    def matrix(name: str, num_out: int, num_in: int, kind: str = type_name) -> NewTensor:
        return NewTensor(name, kind, (num_out, num_in), partial(make, f"{name} {kind}", num_out, num_in))

    def vector(name: str, numbers: NDArray[np.float32]) -> NewTensor:
        return NewTensor(name, "F32", numbers.shape, lambda: numbers)

    ones = np.ones(shape.hidden, np.float32)
    yield vector("rope_freqs.weight", rope_factors(shape))
    yield matrix("token_embd.weight", VOCABULARY, shape.hidden)
    for layer in range(shape.layers):
        yield vector(f"blk.{layer}.attn_norm.weight", ones)
        yield vector(f"blk.{layer}.ffn_norm.weight", ones)
        yield from (matrix(*each) for each in shape.matrices(layer))
    yield vector("output_norm.weight", ones)
    if not shape.is_tied:
        yield matrix("output.weight", VOCABULARY, shape.hidden, HEAD_TYPE)


def rope_factors(shape: LlamaShape) -> NDArray[np.float32]:
    """Return Llama 3's divisors of RoPE frequencies: 1 if fast, the factor if slow, interpolated between."""
    turns = ORIGINAL_CONTEXT / (2 * math.pi) * THETA ** (-np.arange(0, shape.head_size, 2) / shape.head_size)
    smooth = np.clip((turns - LOW) / (HIGH - LOW), 0.0, 1.0)
    return (1.0 / ((1.0 - smooth) / shape.rope_factor + smooth)).astype(np.float32)


# -- bytes of matrices -------------------------------------------------------------------------------------------------


def quantised(label: str, num_out: int, num_in: int) -> Bytes:
    """Return quantised normal numbers, scaled to keep a row's size, from a seed by label. The label ends in a type."""
    dice = np.random.default_rng([SEED, *label.encode()])
    kind = gguf.GGMLQuantizationType[label.rpartition(" ")[2]]
    size, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    data = np.empty((num_out, num_in // size * block_bytes), np.uint8)
    for first in range(0, num_out, 4096):
        count = min(4096, num_out - first)
        numbers = dice.standard_normal((count, num_in), np.float32) * np.float32(num_in**-0.5)
        data[first : first + count] = quants.quantize(numbers, kind)
    return data


class RepeatedBlocks:
    """Random blocks of K-formats, cached because the matrices of all layers share them."""

    def __init__(self) -> None:
        self._kept: dict[str, Bytes] = {}

    def bytes_of(self, label: str, num_out: int, num_in: int) -> Bytes:
        """Return the blocks of a matrix, which are the same in every layer."""
        part = label.removeprefix("blk.").lstrip("0123456789")
        if part not in self._kept:
            self._kept[part] = random_blocks(label.rpartition(" ")[2], num_out, num_in)
        return self._kept[part]


def random_blocks(type_name: str, num_out: int, num_in: int) -> Bytes:
    """Return random codes, with scales such that the numbers are centred and keep a row's size."""
    dice, spread = np.random.default_rng([SEED, num_out, num_in]), num_in**-0.5
    size, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[type_name]]
    num_blocks = num_out * (num_in // size)
    blocks = np.frombuffer(dice.bytes(num_blocks * block_bytes), np.uint8).reshape(num_blocks, block_bytes).copy()
    for offset, scale in _scales(type_name, spread).items():
        blocks[:, offset : offset + 2] = np.array([scale], np.float16).view(np.uint8)
    return blocks.reshape(num_out, -1)


def _scales(type_name: str, spread: float) -> dict[int, float]:
    """Return the fp16 scales of a block by their byte offsets.

    Q4_K is d x scale x code - dmin x minimum: codes are 7.5 on average, hence dmin = 7.5 d; the deviation is 258 d.
    Q6_K is d x scale x (code - 32), whose deviation is 1,366 d.
    """
    if type_name == "Q4_K":
        return {0: spread / 258, 2: 7.5 * spread / 258}
    return {208: spread / 1366}


if __name__ == "__main__":
    for each in SHAPES:
        print(bench_model(each))
