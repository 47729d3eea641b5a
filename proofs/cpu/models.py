"""Whole models of every GGUF format and both arithmetics: logits of sequences in other circumstances, bit for bit.

The models are small, but large enough for blocks of 256 inputs: two layers, random codes, a vocabulary of bytes.
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
from proofs.numerics.native_bits import Desk, Known, Life, Pairs, known_of, threads, together
from quire.backends.cpu.formats.weight_format import FORMATS, Arithmetic
from tests.support.models.gguf_blocks import random_rows
from tests.support.models.tiny_models import byte_level_metadata

SHAPE = LlamaShape(256, 2, 4, 2, 64, 512, 1.0, is_tied=True)
CONTEXT = 1024
NUM_BLOCKS = 400
WORDS = {Arithmetic.FLOAT: "float", Arithmetic.INTEGER: "int8"}
"""As the settings spell them."""


def tiny_file(folder: Path, type_name: str, dice: np.random.Generator) -> Path:
    """A model whose every matrix is of this type."""
    path = folder / f"tiny-{type_name}.gguf"
    metadata = _metadata()
    num_tokens = len(metadata["tokenizer.ggml.tokens"].value)
    write_file(path, metadata, _tensors(type_name, num_tokens, dice))
    return path


def _metadata() -> Metadata:
    counts = {
        "block_count": SHAPE.layers, "context_length": CONTEXT, "embedding_length": SHAPE.hidden,
        "feed_forward_length": SHAPE.wide, "attention.head_count": SHAPE.heads,
        "attention.head_count_kv": SHAPE.kv_heads,
    }  # fmt: skip
    found = {f"llama.{key}": Value(value, gguf.GGUFValueType.UINT32) for key, value in counts.items()}
    found["llama.attention.layer_norm_rms_epsilon"] = Value(1e-5, gguf.GGUFValueType.FLOAT32)
    for key, value in byte_level_metadata().items():
        is_list = isinstance(value, list)
        kind = gguf.GGUFValueType.get_type(value[0] if is_list else value)
        kind = gguf.GGUFValueType.UINT32 if key.endswith("_id") else kind
        found[key] = Value(value, gguf.GGUFValueType.ARRAY, kind) if is_list else Value(value, kind)
    return found


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
        yield NewTensor(name, type_name, (num_out, num_in), lambda made=stored: made)  # type: ignore[misc]


def kinds() -> list[tuple[str, Arithmetic]]:
    """GGUF's formats with their arithmetics."""
    return [(name, kind) for name, made in FORMATS.items() if not made.has_group for kind in made.arithmetics]


def circumstances_of(
    folder: Path, random: Random, name: str, kind: Arithmetic, num_texts: int, thread_counts: tuple[int, ...]
) -> Pairs:
    """Texts alone and whole, and the same in chunks, in company, and with other numbers of threads."""
    file = tiny_file(folder, name, np.random.default_rng(random.getrandbits(64)))
    settings = {"arithmetic": WORDS[kind]} if name not in ("F32", "F16", "BF16") else {}
    model = load_decoder(file, dtype="auto", max_sequence_tokens=CONTEXT, **settings)
    desk, pairs = Desk(random, model, NUM_BLOCKS, "float32" if name == "F32" else "bfloat16"), Pairs()
    known = [known_of(desk, _text(random, model.vocabulary_size)) for _ in range(num_texts)]
    for one in known:
        _alone_otherwise(desk, pairs, one, thread_counts)
    together(desk, pairs, known)
    return pairs


def _text(random: Random, vocabulary: int) -> list[int]:
    return [random.randrange(3, vocabulary) for _ in range(random.randint(2, 5 * BLOCK))]


def _alone_otherwise(desk: Desk, pairs: Pairs, one: Known, thread_counts: tuple[int, ...]) -> None:
    with desk.blocks(len(one.tokens)) as blocks:
        size = desk.random.choice([1, 7, BLOCK])
        pairs.judge("chunks", Life(one.tokens, blocks).run(desk, size).digests, one.digests)
        for count in thread_counts:
            with threads(count):
                pairs.judge(f"threads_{count}", Life(one.tokens, blocks).run(desk).digests, one.digests)
