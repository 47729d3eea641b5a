"""The schemes by which safetensors files keep small codes, packed here word by word as their authors describe them."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from quire.backends.cpu.formats.gguf_source import gguf_source
from quire.backends.cpu.formats.packed_weight import PackedWeight
from quire.backends.cpu.formats.safetensors_source import SCHEMES, StoredArray
from quire.backends.cpu.formats.weight_format import Arithmetic
from quire.backends.kernels.large_pages import Arena
from quire.checkpoints.quantisation import Quantisation
from quire.errors import CheckpointError
from tests.support.errors import raises_code
from tests.support.models.gguf_blocks import panel_product
from tests.support.models.quantised import Codes, Pack, Quantised, awq, compressed, gptq

pytest.importorskip("quire._native")


def scheme_of(num_bits: int, group: int | None, *, is_symmetric: bool = True) -> Quantisation:
    """As a config of any scheme is read, and of GPTQ's first file format."""
    return Quantisation("", num_bits, group, is_symmetric, zeros_are_less_one=True)


CASES = [
    ("pack-quantized", compressed, 4),
    ("pack-quantized", compressed, 8),
    ("gptq", gptq, 4),
    ("gptq", gptq, 8),
    ("awq", awq, 4),
]


@pytest.mark.parametrize(("name", "pack", "num_bits"), CASES)
@settings(max_examples=10)
@given(
    sizes=st.tuples(st.integers(1, 9), st.sampled_from([32, 64, 128]), st.integers(1, 3)),
    is_by_channel=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_a_scheme_gives_the_weights_its_codes_stand_for(
    name: str, pack: Pack, num_bits: int, sizes: tuple[int, int, int], is_by_channel: bool, seed: int
) -> None:
    eights, group, num_groups = sizes
    num_in = group * num_groups
    made = Quantised.draw(num_bits, 8 * eights, num_in, num_in if is_by_channel else group, seed)
    options = scheme_of(num_bits, None if is_by_channel else group, is_symmetric=False)
    weight = PackedWeight([SCHEMES[name](pack(made, num_bits), options)], Arena())
    assert np.array_equal(weight.rows(np.arange(8 * eights)), made.weight)


def test_both_arithmetics_multiply_the_codes_of_a_scheme() -> None:
    made = Quantised.draw(4, 48, 256, 128, 1)
    options = scheme_of(4, 128)
    weight = PackedWeight([SCHEMES["gptq"](gptq(made, 4), options)], Arena())
    rows = np.random.default_rng(2).standard_normal((9, 256)).astype(np.float32)
    wanted = rows.astype(np.float64) @ made.weight.astype(np.float64).T
    sizes = np.abs(rows).astype(np.float64) @ np.abs(made.weight).astype(np.float64).T
    for kind, most in ((Arithmetic.FLOAT, 2e-6), (Arithmetic.INTEGER, 5e-3)):
        out = panel_product(weight, rows, kind)
        assert np.max(np.abs(out - wanted) / sizes) < most


def test_symmetric_codes_have_their_zero_in_the_middle() -> None:
    made = Quantised.draw(4, 16, 64, 32, 3)
    tensors = {name: tensor for name, tensor in compressed(made, 4).items() if name != "weight_zero_point"}
    weight = PackedWeight([SCHEMES["pack-quantized"](tensors, scheme_of(4, 32))], Arena())
    middle = Quantised(made.codes, made.scales, np.full_like(made.zeros, 8), 32)
    assert np.array_equal(weight.rows(np.arange(16)), middle.weight)


def test_groups_in_an_order_of_their_own_are_refused() -> None:
    made = Quantised.draw(4, 16, 64, 32, 3)
    tensors = gptq(made, 4) | {"g_idx": StoredArray("I32", np.arange(64, dtype=np.int32)[::-1] // 32)}
    with raises_code(CheckpointError, "groups_in_other_order"):
        SCHEMES["gptq"](tensors, scheme_of(4, 32))


def test_bits_groups_and_scales_that_do_not_fit_are_refused() -> None:
    made = Quantised.draw(4, 16, 64, 32, 3)
    with raises_code(CheckpointError, "invalid_checkpoint"):
        SCHEMES["gptq"](gptq(made, 4), scheme_of(3, 32))
    with raises_code(CheckpointError, "wrong_num_bits"):
        SCHEMES["awq"](awq(made, 4), scheme_of(8, 32))
    with raises_code(CheckpointError, "wrong_scales"):
        SCHEMES["awq"](awq(made, 4), scheme_of(4, 64))
    with raises_code(CheckpointError, "wrong_group_size"):
        SCHEMES["awq"](awq(Quantised.draw(4, 16, 64, 16, 3), 4), scheme_of(4, 16))


def e4m3(codes: Codes) -> NDArray[np.float64]:
    exponent, mantissa = codes >> 3 & 15, (codes & 7).astype(np.float64)
    size = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent.astype(np.float64) - 10))
    return np.where(codes & 0x80, -1.0, 1.0) * np.where(codes & 0x7F == 0x7F, np.nan, size)


ALL_CODES = np.arange(256, dtype=np.uint8).reshape(4, 64)


@pytest.mark.parametrize(
    ("name", "scales", "group"),
    [
        ("weight_scale", np.array([0.25, 3.0, 1e-3, 7.5], np.float32)[:, None], None),
        ("weight_scale", np.array([0.3], np.float32), None),
        ("weight_scale", np.array(0.3, np.float32), None),
        ("weight_scale_inv", np.array([[0.5, 0.3]], np.float32), 32),
    ],
)
def test_fp8_codes_are_their_numbers_times_their_scales(
    name: str, scales: NDArray[np.float32], group: int | None
) -> None:
    tensors = {"weight": StoredArray("F8_E4M3", ALL_CODES), name: StoredArray("F32", scales)}
    weight = PackedWeight([SCHEMES["fp8"](tensors, scheme_of(8, group))], Arena())
    each = (
        scales
        if scales.size == 1
        else np.repeat(np.broadcast_to(scales, (4, scales.shape[1])), 64 // scales.shape[1], axis=1)
    )
    wanted = e4m3(ALL_CODES).astype(np.float32) * each
    assert np.array_equal(weight.rows(np.arange(4)), wanted, equal_nan=True)


@pytest.mark.parametrize("name", ["F32", "F16", "BF16"])
def test_plain_numbers_stay_what_they_are(name: str) -> None:
    numbers = np.random.default_rng(4).standard_normal((20, 24)).astype(np.float32)
    halves = (numbers.view(np.uint32) >> 16).astype(np.uint16)
    kept = {"F32": StoredArray("F32", numbers), "F16": StoredArray("F16", numbers.astype(np.float16))}
    stored = kept.get(name, StoredArray("BF16", halves))
    weight = PackedWeight([gguf_source(name, stored.array.view(np.uint8), 24)], Arena())
    assert weight.format.name == name
    assert np.array_equal(weight.rows(np.arange(20)), stored.floats())


def test_other_types_are_refused_by_name() -> None:
    with raises_code(CheckpointError, "unknown_weight_type"):
        gguf_source("I32", np.zeros((2, 8), np.uint8), 2)
    with raises_code(CheckpointError, "invalid_checkpoint"):
        StoredArray("I32", np.zeros(2, np.int32)).floats()
