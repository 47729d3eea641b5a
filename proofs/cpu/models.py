"""Compares logits of sequences bit for bit in varying batches, with models of every GGUF format and both arithmetics.

The models are small, but large enough for blocks of 256 inputs: two layers, random weights, a vocabulary of bytes.
"""

from collections.abc import Iterator
from pathlib import Path
from random import Random

import gguf
import numpy as np

from benchmarks.bench_models import LlamaShape
from benchmarks.gguf_files import Metadata, NewTensor, Value, write_file
from benchmarks.steps import BLOCK
from proofs.cpu.loading import load_decoder
from proofs.numerics.native_bits import FedSequence, Harness, Pairs, Reference, compare_batch, reference_of, threads
from quire.backends.cpu.formats.weight_format import FORMATS, Arithmetic
from tests.support.models.gguf_blocks import random_rows
from tests.support.models.tiny_models import byte_level_metadata

SHAPE = LlamaShape(256, 2, 4, 2, 64, 512, 1.0, is_tied=True)
CONTEXT = 1024
NUM_BLOCKS = 400
ARITHMETIC_NAMES = {Arithmetic.FLOAT: "float", Arithmetic.INTEGER: "int8"}
"""The arithmetics by their names in the settings."""


def tiny_file(folder: Path, type_name: str, dice: np.random.Generator) -> Path:
    """A model whose every matrix is of this type."""
    path, metadata = folder / f"tiny-{type_name}.gguf", _metadata()
    num_tokens = len(metadata["tokenizer.ggml.tokens"].value)
    write_file(path, metadata, _tensors(type_name, num_tokens, dice))
    return path


def _metadata() -> Metadata:
    counts = {
        "block_count": SHAPE.layers, "context_length": CONTEXT, "embedding_length": SHAPE.hidden,
        "feed_forward_length": SHAPE.wide, "attention.head_count": SHAPE.heads,
        "attention.head_count_kv": SHAPE.kv_heads,
    }  # fmt: skip
    metadata = {f"llama.{key}": Value(value, gguf.GGUFValueType.UINT32) for key, value in counts.items()}
    metadata["llama.attention.layer_norm_rms_epsilon"] = Value(1e-5, gguf.GGUFValueType.FLOAT32)
    for key, value in byte_level_metadata().items():
        is_list = isinstance(value, list)
        value_type = gguf.GGUFValueType.get_type(value[0] if is_list else value)
        value_type = gguf.GGUFValueType.UINT32 if key.endswith("_id") else value_type
        metadata[key] = Value(value, gguf.GGUFValueType.ARRAY, value_type) if is_list else Value(value, value_type)
    return metadata


def _tensors(type_name: str, num_tokens: int, dice: np.random.Generator) -> Iterator[NewTensor]:
    ones = np.ones(SHAPE.hidden, np.float32)
    matrices = [("token_embd.weight", num_tokens, SHAPE.hidden)]
    for layer in range(SHAPE.layers):
        matrices += SHAPE.matrices(layer)
        for name in ("attn_norm", "ffn_norm"):
            yield NewTensor(f"blk.{layer}.{name}.weight", "F32", ones.shape, lambda: ones)
    yield NewTensor("output_norm.weight", "F32", ones.shape, lambda: ones)
    for name, num_out, num_in in matrices:
        rows = random_rows(type_name, num_out, num_in, dice)
        stored = rows.view(np.float32) if type_name == "F32" else rows
        yield NewTensor(name, type_name, (num_out, num_in), lambda array=stored: array)  # type: ignore[misc]


def kinds() -> list[tuple[str, Arithmetic]]:
    """The GGUF formats with their arithmetics."""
    return [(name, kind) for name, fmt in FORMATS.items() if not fmt.has_group for kind in fmt.arithmetics]


def compare_circumstances(
    folder: Path, random: Random, name: str, kind: Arithmetic, num_texts: int, thread_counts: tuple[int, ...]
) -> Pairs:
    """Compare texts computed alone in one piece with the same in chunks, in a batch, and with more threads."""
    file = tiny_file(folder, name, np.random.default_rng(random.getrandbits(64)))
    settings = {"arithmetic": ARITHMETIC_NAMES[kind]} if name not in ("F32", "F16", "BF16") else {}
    model = load_decoder(file, dtype="auto", max_sequence_tokens=CONTEXT, **settings)
    harness, pairs = Harness(random, model, NUM_BLOCKS, "float32" if name == "F32" else "bfloat16"), Pairs()
    references = [reference_of(harness, _text(random, model.vocabulary_size)) for _ in range(num_texts)]
    for reference in references:
        _compare_alone(harness, pairs, reference, thread_counts)
    compare_batch(harness, pairs, references)
    return pairs


def _text(random: Random, vocabulary: int) -> list[int]:
    return [random.randrange(3, vocabulary) for _ in range(random.randint(2, 5 * BLOCK))]


def _compare_alone(harness: Harness, pairs: Pairs, expected: Reference, thread_counts: tuple[int, ...]) -> None:
    with harness.blocks(len(expected.tokens)) as blocks:
        size = harness.random.choice([1, 7, BLOCK])
        pairs.compare("chunks", FedSequence(expected.tokens, blocks).run(harness, size).digests, expected.digests)
        for count in thread_counts:
            with threads(count):
                sequence = FedSequence(expected.tokens, blocks).run(harness)
                pairs.compare(f"threads_{count}", sequence.digests, expected.digests)
