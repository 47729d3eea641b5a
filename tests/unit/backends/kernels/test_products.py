"""Packed products and the memory they lie in: right, and blind to other rows."""

import os
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest

from quire.backends.kernels import extension, products, threads
from quire.backends.kernels.arrays import Floats
from quire.backends.kernels.large_pages import Arena
from quire.backends.kernels.products import PIECE_ROWS, PackedProduct, round_to_dtype
from quire.backends.kernels.threads import num_threads, physical_cores, use_threads
from quire.errors import InvariantError
from tests.support.errors import raises_code

needs_kernels = pytest.mark.skipif(not extension.availability().is_available, reason=extension.availability().reason)
TYPES = ("float32", "bfloat16")
DICE = np.random.default_rng(3)


def numbers(*size: int) -> Floats:
    return DICE.standard_normal(size, np.float32)


def packed(weight: Floats, bias: Floats | None = None, dtype: str = "float32") -> PackedProduct:
    return PackedProduct([weight], (len(weight), weight.shape[1]), bias, dtype, Arena())


def multiplied(weight: PackedProduct, rows: Floats) -> Floats:
    out = np.full((len(rows), weight.num_out), np.nan, np.float32)
    weight.product(rows, out)
    return out


@needs_kernels
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("sizes", [(576, 960), (1536, 576), (24, 40), (33, 65), (1, 1), (700, 31)])
@pytest.mark.parametrize("is_biased", [True, False])
def test_products_are_right_and_do_not_see_other_rows(dtype: str, sizes: tuple[int, int], is_biased: bool) -> None:
    num_in, num_out = sizes
    weight, bias = round_to_dtype(numbers(num_out, num_in), dtype), numbers(num_out) if is_biased else None
    product, rows = packed(weight, bias, dtype), round_to_dtype(numbers(700, num_in), dtype)
    whole = multiplied(product, rows)
    exact = rows.astype(np.float64) @ weight.T.astype(np.float64) + (0.0 if bias is None else bias)
    assert np.allclose(whole, exact, atol=1e-3)
    for count in range(1, 600, 7):
        assert np.array_equal(multiplied(product, rows[7 : 7 + count]), whole[7 : 7 + count]), count


@needs_kernels
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("size", [(1, 1), (95, 70), (97, 33), (500, 64)])
def test_rows_come_back_as_the_type_holds_them(dtype: str, size: tuple[int, int]) -> None:
    weight = numbers(*size)
    indices = DICE.integers(0, size[0], 40)
    assert np.array_equal(packed(weight, None, dtype).rows(indices), round_to_dtype(weight, dtype)[indices])
    with raises_code(InvariantError, "row_out_of_range"):
        packed(weight, None, dtype).rows(np.array([size[0]]))


@needs_kernels
@pytest.mark.parametrize("dtype", TYPES)
def test_a_weight_in_pieces_is_the_weight(dtype: str) -> None:
    weight, rows = numbers(5 * PIECE_ROWS + 7, 40), numbers(9, 40)
    cuts = [0, PIECE_ROWS, 3 * PIECE_ROWS, 5 * PIECE_ROWS, len(weight)]
    pieces = [weight[first:end] for first, end in pairwise(cuts)]
    whole = PackedProduct(pieces, (len(weight), 40), None, dtype, Arena())
    assert np.array_equal(multiplied(whole, rows), multiplied(packed(weight, None, dtype), rows))
    for wrong in ([weight[:7], weight[7:]], [weight[:PIECE_ROWS]], [weight, weight[:1]]):
        with raises_code(InvariantError, "rows_not_whole"):
            PackedProduct(wrong, (len(weight), 40), None, dtype, Arena())


@needs_kernels
@pytest.mark.parametrize("dtype", TYPES)
def test_products_have_the_same_bits_with_any_number_of_threads(dtype: str) -> None:
    product, rows, before = packed(numbers(960, 576), None, dtype), numbers(300, 576), num_threads()
    try:
        whole = [multiplied(product, rows) for count in (1, 2, 3, 7) if use_threads(count)]
    finally:
        use_threads(before)
    assert all(np.array_equal(one, whole[0]) for one in whole)


@needs_kernels
@pytest.mark.parametrize("dtype", TYPES)
def test_a_row_that_is_not_finite_leaves_its_neighbours_alone(dtype: str) -> None:
    product, rows = packed(numbers(50, 64), None, dtype), numbers(37, 64)
    whole = multiplied(product, rows)
    rows[3, 5], rows[20, 0] = np.nan, np.inf
    others = [at for at in range(37) if at not in (3, 20)]
    assert np.array_equal(multiplied(product, rows)[others], whole[others])
    assert not np.isfinite(multiplied(product, rows)[3]).any()


@needs_kernels
def test_products_take_rows_that_lie_apart_and_refuse_others() -> None:
    product, wide = packed(numbers(50, 64)), numbers(20, 100)
    assert np.array_equal(multiplied(product, wide[:, 3:67]), multiplied(product, np.ascontiguousarray(wide[:, 3:67])))
    for rows in (wide, wide[:, :64].astype(np.float64), wide[:, ::2], wide[0]):
        with raises_code(InvariantError, "invariant_broken"):
            multiplied(product, rows)  # type: ignore[arg-type]
    with raises_code(InvariantError, "wrong_output_rows"):
        product.product(wide[:, :64], np.empty((3, 50), np.float32))
    with raises_code(InvariantError, "invariant_broken"):
        packed(numbers(4, 4), None, "float16")


@pytest.mark.parametrize("wrong", ["numbers", "company", "operator"])
def test_a_probe_finds_what_is_wrong(wrong: str) -> None:
    def prepare(weight: Floats) -> Callable[[Floats], Floats]:
        def product(rows: Floats) -> Floats:
            if wrong == "operator":
                raise RuntimeError
            out = np.stack([weight @ row for row in rows])
            return out * np.float32(1.01) if wrong == "numbers" else out + np.float32(len(rows) * 1e-7)

        return product

    complaint = products.check_products("theirs", prepare, products.LIBRARY_SHAPES, (2, 4))
    assert complaint is not None
    assert {"numbers": "wrong", "company": "row-invariant", "operator": "RuntimeError"}[wrong] in complaint


def test_a_shelf_hands_out_lines_that_do_not_overlap() -> None:
    arena = Arena()
    pieces = [arena.take(size) for size in (1, 64, 100, Arena.BUFFER_BYTES + 1, 7)]
    spans = sorted((piece.ctypes.data, piece.ctypes.data + len(piece)) for piece in pieces)
    assert all(first % 64 == 0 for first, _ in spans)
    assert all(one[1] <= other[0] for one, other in pairwise(spans))


def test_a_physical_core_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {0, 1, 2, 3})
    monkeypatch.setattr(threads, "_siblings", lambda cpu: f"{cpu % 2},{cpu % 2 + 2}")
    assert physical_cores() == 2
    monkeypatch.setattr(threads, "_siblings", str)
    assert physical_cores() == 4
