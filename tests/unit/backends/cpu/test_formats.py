"""Weights in panels: against the numbers the `gguf` package reads from the same bytes, and against themselves."""

import json
import logging
import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from quire.backends.cpu.formats.gguf_source import _warn_converted, gguf_source
from quire.backends.cpu.formats.packed_weight import PackedWeight, can_join
from quire.backends.cpu.formats.weight_format import FORMATS, Arithmetic
from quire.backends.kernels.large_pages import Arena
from quire.errors import CheckpointError, InvariantError
from tests.support.errors import raises_code
from tests.support.models.gguf_blocks import dequantize, random_rows
from tests.support.models.gguf_blocks import panel_product as multiply

pytest.importorskip("quire._native")

GGUF_FORMATS = [name for name, made in FORMATS.items() if not made.has_group]
INTEGER_FORMATS = [name for name in GGUF_FORMATS if Arithmetic.INTEGER in FORMATS[name].arithmetics]
ALL_PAIRS = [(name, kind) for name in GGUF_FORMATS for kind in FORMATS[name].arithmetics]
Floats = NDArray[np.float32]


def packed(name: str, rows: NDArray[np.uint8], num_in: int) -> PackedWeight:
    return PackedWeight([gguf_source(name, rows, num_in)], Arena())


def rounded(rows: Floats) -> NDArray[np.float64]:
    """To 8 bits for each 32 inputs, as the integer arithmetic is defined."""
    groups = rows.reshape(len(rows), -1, 32)
    largest = np.abs(groups).max(-1, keepdims=True)
    inverse = np.divide(np.float32(127), largest, out=np.zeros_like(largest), where=largest > 0)
    whole = np.rint(groups * inverse).astype(np.float64)
    made: NDArray[np.float64] = (whole * (largest / np.float32(127)).astype(np.float64)).reshape(rows.shape)
    return made


def worst_error(out: Floats, rows: NDArray[np.floating], weight: Floats) -> float:
    """Relative to the sizes that were added up."""
    rows, wide = rows.astype(np.float64), weight.astype(np.float64)
    return float(np.max(np.abs(out - rows @ wide.T) / (np.abs(rows) @ np.abs(wide).T + 1e-30)))


shapes = st.tuples(st.integers(1, 70), st.integers(1, 3), st.integers(1, 40), st.integers(0, 2**32 - 1))


@pytest.mark.parametrize("name", GGUF_FORMATS)
@settings(max_examples=8)
@given(shape=shapes)
def test_the_rows_of_a_packed_weight_are_what_its_file_says(name: str, shape: tuple[int, int, int, int]) -> None:
    num_out, blocks, _, seed = shape
    num_in = blocks * max(32, FORMATS[name].block_size)
    rows = random_rows(name, num_out, num_in, np.random.default_rng(seed))
    indices = np.random.default_rng(seed).integers(0, num_out, 5)
    assert np.array_equal(packed(name, rows, num_in).rows(indices), dequantize(name, rows)[indices])


@pytest.mark.parametrize("name", GGUF_FORMATS)
@settings(max_examples=8)
@given(shape=shapes)
def test_a_float_product_is_that_of_the_files_numbers(name: str, shape: tuple[int, int, int, int]) -> None:
    num_out, blocks, num_rows, seed = shape
    dice, num_in = np.random.default_rng(seed), blocks * max(32, FORMATS[name].block_size)
    source, rows = random_rows(name, num_out, num_in, dice), dice.standard_normal((num_rows, num_in)).astype(np.float32)
    out = multiply(packed(name, source, num_in), rows, Arithmetic.FLOAT)
    assert worst_error(out, rows, dequantize(name, source)) < 2e-6


@pytest.mark.parametrize("name", GGUF_FORMATS)
def test_a_float_product_has_the_bits_of_float32_weights(name: str) -> None:
    dice = np.random.default_rng(1)
    source, rows = random_rows(name, 50, 512, dice), dice.standard_normal((11, 512)).astype(np.float32)
    plain = packed("F32", np.ascontiguousarray(dequantize(name, source)).view(np.uint8), 512)
    out = multiply(packed(name, source, 512), rows, Arithmetic.FLOAT)
    assert np.array_equal(out, multiply(plain, rows, Arithmetic.FLOAT))


@pytest.mark.parametrize("name", INTEGER_FORMATS)
@settings(max_examples=8)
@given(shape=shapes)
def test_an_integer_product_is_that_of_rounded_rows(name: str, shape: tuple[int, int, int, int]) -> None:
    num_out, blocks, num_rows, seed = shape
    dice, num_in = np.random.default_rng(seed), blocks * FORMATS[name].block_size
    source, rows = random_rows(name, num_out, num_in, dice), dice.standard_normal((num_rows, num_in)).astype(np.float32)
    out = multiply(packed(name, source, num_in), rows, Arithmetic.INTEGER)
    assert worst_error(out, rounded(rows), dequantize(name, source)) < 2e-6


@pytest.mark.parametrize(("name", "kind"), ALL_PAIRS)
@settings(max_examples=6)
@given(num_rows=st.integers(1, 300), seed=st.integers(0, 2**32 - 1), num_threads=st.sampled_from([1, 2, 3, 8, 32]))
def test_a_row_has_its_bits_in_any_company(
    name: str, kind: Arithmetic, num_rows: int, seed: int, num_threads: int
) -> None:
    dice = np.random.default_rng(seed)
    num_out, num_in = int(dice.integers(1, 120)), 256 * int(dice.integers(1, 3))
    weight = packed(name, random_rows(name, num_out, num_in, dice), num_in)
    rows = dice.standard_normal((num_rows, num_in)).astype(np.float32)
    together = multiply(weight, rows, kind, num_threads)
    first = int(dice.integers(0, num_rows))
    end = int(dice.integers(first, num_rows)) + 1
    assert np.array_equal(together[first:end], multiply(weight, rows[first:end], kind, 1))
    assert np.array_equal(together[first], multiply(weight, rows[first : first + 1], kind, 2)[0])


@pytest.mark.parametrize("isa", ["portable", "avx2", "avxvnni", "avx512", "avx512vnni"])
def test_integer_products_have_the_same_bits_on_every_instruction_set(isa: str) -> None:
    def printed(isa: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "QUIRE_INSTRUCTION_SET": isa}
        command = [sys.executable, "-m", "tests.support.models.format_prints"]
        return subprocess.run(command, env=environment, capture_output=True, text=True)

    here, portable = printed(isa), printed("portable")
    if "expected an instruction set of this processor" in here.stderr:
        pytest.skip(f"this processor has no {isa}")
    assert len(json.loads(portable.stdout)) == len(INTEGER_FORMATS)
    assert here.stdout == portable.stdout, here.stderr


@pytest.mark.parametrize(("name", "kind"), [("Q4_K", Arithmetic.INTEGER), ("Q8_0", Arithmetic.FLOAT)])
def test_tensors_of_one_format_are_one_weight_with_a_bias(name: str, kind: Arithmetic) -> None:
    dice = np.random.default_rng(3)
    parts = [random_rows(name, num_out, 256, dice) for num_out in (32, 16, 21)]
    bias, rows = dice.standard_normal(69).astype(np.float32), dice.standard_normal((4, 256)).astype(np.float32)
    weight = PackedWeight([gguf_source(name, part, 256) for part in parts], Arena(), bias)
    alone = np.concatenate([multiply(packed(name, part, 256), rows, kind) for part in parts], axis=1)
    assert np.array_equal(multiply(weight, rows, kind), alone + bias)


def test_rows_that_are_not_finite_have_no_finite_products() -> None:
    dice = np.random.default_rng(5)
    weight = packed("Q4_0", random_rows("Q4_0", 20, 64, dice), 64)
    rows = dice.standard_normal((3, 64)).astype(np.float32)
    rows[0, 40], rows[2, 1] = np.inf, np.nan
    for kind in Arithmetic:
        assert np.isfinite(multiply(weight, rows, kind)).all(axis=1).tolist() == [False, True, False]


@pytest.mark.parametrize(("name", "most"), [("Q4_K", 1.03), ("Q6_K", 1.02), ("Q4_0", 1.02), ("Q8_0", 1.01)])
def test_panels_are_hardly_larger_than_the_file(name: str, most: float) -> None:
    rows = random_rows(name, 64, 8192, np.random.default_rng(0))
    assert packed(name, rows, 8192).num_bytes <= most * rows.nbytes


@pytest.mark.parametrize(("name", "scale_bytes", "code_bits"), [("Q4_K", 20 / 256, 4), ("Q6_K", 18 / 256, 6),
                                                                ("Q4_0", 2 / 32, 4), ("Q8_0", 2 / 32, 8)])  # fmt: skip
@pytest.mark.parametrize("num_in", [256, 512, 2048, 2304])
def test_a_panel_is_its_scales_its_codes_and_at_most_one_more_line(
    name: str, scale_bytes: float, code_bits: int, num_in: int
) -> None:
    lines = -(-int(16 * num_in * scale_bytes) // 64) + 16 * num_in * code_bits // 8 // 64
    rows = random_rows(name, 64, num_in, np.random.default_rng(0))
    # Of an even number of lines, panels would fall onto the same places of a cache.
    assert packed(name, rows, num_in).num_bytes == 4 * 64 * (lines + (lines + 1) % 2)


@pytest.mark.parametrize("name", ["Q2_K", "Q3_K", "IQ3_S", "TQ2_0"])
def test_types_without_kernels_are_widened_to_8_bits_and_the_log_says_so(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    rows = random_rows(name, 40, 512, np.random.default_rng(2))
    _warn_converted.cache_clear()  # once for each type in a process
    with caplog.at_level(logging.WARNING, "quire.backends"):
        weight = packed(name, rows, 512)
    assert weight.format.name == "Q8_0"
    assert f"no kernels for weights of type {name}" in caplog.text
    wanted = dequantize(name, rows)
    groups = np.abs(wanted).reshape(40, -1, 32).max(-1)
    error = np.abs(weight.rows(np.arange(40)) - wanted).reshape(40, -1, 32).max(-1)
    assert (error <= groups * (0.5 / 127 + 2**-10)).all()


def test_inputs_that_are_no_whole_blocks_are_refused() -> None:
    with raises_code(CheckpointError, "inputs_not_whole"):
        gguf_source("Q4_K", np.zeros((4, 162), np.uint8), 288)
    with raises_code(CheckpointError, "invalid_checkpoint"):
        gguf_source("Q4_K", np.zeros((4, 143), np.uint8), 256)
    with raises_code(CheckpointError, "unknown_weight_type"):
        gguf_source("Q9_Z", np.zeros((4, 143), np.uint8), 256)


def test_what_does_not_fit_is_refused() -> None:
    dice = np.random.default_rng(0)
    weight = packed("F32", random_rows("F32", 5, 7, dice), 7)
    with raises_code(InvariantError, "invariant_broken"):
        weight.rows(np.array([5]))
    sources = [gguf_source("F32", random_rows("F32", 5, 7, dice), 7) for _ in range(2)]
    assert not can_join(sources)
    with raises_code(InvariantError, "invariant_broken"):
        PackedWeight(sources, Arena())


def test_an_arena_hands_out_lines_of_shared_boards() -> None:
    arena = Arena()
    pieces = [arena.take(size) for size in (1, 100, 64)]
    assert [piece.ctypes.data % 64 for piece in pieces] == [0, 0, 0]
    assert pieces[1].ctypes.data - pieces[0].ctypes.data == 64
    assert len(arena.take(Arena.BUFFER_BYTES + 1)) == Arena.BUFFER_BYTES + 1
