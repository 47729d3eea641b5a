"""The models that speed is measured on: sane numbers, and shapes that quire reads as those of Llama 3."""

from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import quants

from benchmarks.bench_models import SHAPES, VOCABULARY, RepeatedBlocks, quantised, random_blocks, rope_factors
from benchmarks.gguf_files import NewTensor, Value, padded_tokenizer, write_file
from quire.checkpoints.gguf.config import llama3_scaling
from quire.errors import CheckpointError
from tests.support.errors import raises_code


@pytest.mark.parametrize("type_name", ["Q4_K", "Q6_K"])
def test_random_blocks_stand_for_centred_numbers_that_keep_a_rows_size(type_name: str) -> None:
    numbers = quants.dequantize(random_blocks(type_name, 64, 4096), gguf.GGMLQuantizationType[type_name])
    assert np.isfinite(numbers).all()
    assert abs(numbers.mean()) < 0.02 * 4096**-0.5
    assert numbers.std() == pytest.approx(4096**-0.5, rel=0.05)


def test_the_same_seed_quantises_the_same_bytes_and_another_matrix_others() -> None:
    one = quantised("blk.0.attn_q.weight Q4_0", 8, 64)
    assert np.array_equal(one, quantised("blk.0.attn_q.weight Q4_0", 8, 64))
    assert not np.array_equal(one, quantised("blk.1.attn_q.weight Q4_0", 8, 64))


def test_layers_of_the_large_model_repeat_their_bytes_and_the_head_has_its_own() -> None:
    made = RepeatedBlocks()
    first = made.bytes_of("blk.0.attn_q.weight Q4_K", 4, 256)
    assert made.bytes_of("blk.31.attn_q.weight Q4_K", 4, 256) is first
    assert made.bytes_of("output.weight Q6_K", 4, 256).shape == (4, 210)


@pytest.mark.parametrize("name", sorted(SHAPES))
def test_rope_factors_are_those_that_quire_knows_as_llama_3s(name: str) -> None:
    shape = SHAPES[name]
    found = llama3_scaling(
        {"rope_theta": 500_000.0, "head_dim": shape.head_size}, tuple(map(float, rope_factors(shape)))
    )
    assert found is not None
    assert found["factor"] == shape.rope_factor


def test_a_padded_tokenizer_has_a_different_unused_token_for_each_missing_row() -> None:
    text, number = gguf.GGUFValueType.STRING, gguf.GGUFValueType.INT32
    given = {
        "general.name": Value("not of the tokenizer", text),
        "tokenizer.ggml.tokens": Value(["a", "b"], gguf.GGUFValueType.ARRAY, text),
        "tokenizer.ggml.token_type": Value([1, 1], gguf.GGUFValueType.ARRAY, number),
    }
    made = padded_tokenizer(given, VOCABULARY)
    assert len(set(made["tokenizer.ggml.tokens"].value)) == VOCABULARY
    assert made["tokenizer.ggml.token_type"].value[2:] == [5] * (VOCABULARY - 2)
    assert "general.name" not in made


def test_a_written_file_has_the_bytes_that_were_made(tmp_path: Path) -> None:
    rows = quantised("one Q4_0", 3, 64)
    path = tmp_path / "model.gguf"
    write_file(path, {}, [NewTensor("one.weight", "Q4_0", (3, 64), lambda: rows)])
    (tensor,) = gguf.GGUFReader(path).tensors
    assert tuple(tensor.shape) == (64, 3)
    assert np.array_equal(tensor.data, rows)


def test_a_file_that_does_not_fit_is_refused_before_it_is_begun(tmp_path: Path) -> None:
    huge = NewTensor("one.weight", "F32", (1 << 30, 1 << 20), lambda: np.empty(0))
    with raises_code(CheckpointError, "invalid_checkpoint"):
        write_file(tmp_path / "model.gguf", {}, [huge])
    assert not list(tmp_path.iterdir())
