"""What fits in how much memory: reckoned bytes are those of files, and more memory never holds less."""

import pytest

from benchmarks.bench_models import SHAPES, TYPES, _tensors, quantised
from benchmarks.cpu_figures import EXACT, SPEED, circumstances_of, rows_of
from benchmarks.fits import GIB, HELD, MEMORIES_GB, MODELS, fit_rows, tokens_that_fit
from benchmarks.tables import TABLES


@pytest.mark.parametrize(("name", "at"), [("1b", 0), ("8b", 3)])
def test_reckoned_weights_are_the_matrices_of_a_file_of_that_shape(name: str, at: int) -> None:
    tensors = _tensors(SHAPES[name], TYPES[name], quantised)
    in_file = sum(tensor.num_bytes for tensor in tensors if len(tensor.shape) > 1)
    head = "Q6_K" if name == "8b" else TYPES[name]
    assert MODELS[at].weight_bytes(TYPES[name], head) == in_file


def test_more_memory_holds_more_tokens_and_fewer_bits_leave_more_room() -> None:
    for shape in MODELS:
        for name in HELD:
            found = [tokens_that_fit(shape, name, size * GIB) for size in MEMORIES_GB]
            assert found == sorted(found)
        by_format = [tokens_that_fit(shape, name, 64 * GIB) for name in ("BF16", "Q8_0", "Q4_K")]
        assert by_format == sorted(by_format)


def test_a_model_that_fits_nowhere_has_no_row() -> None:
    rows = [(model, name) for model, name, *_ in fit_rows()]
    assert ("Llama 3.1 70B", "Q4_K") in rows
    assert ("Llama 3.1 70B", "BF16") not in rows


RECORD = {
    "proof": "cpu",
    "figures": {"bitexact_pairs": 2100, "memory_speed_1b": 0.81},
    "bounds": {"bitexact_pairs": "at least 2,000", "memory_speed_1b": "at least 0.7: 0.70 GB in 40 ms"},
    "date": "2026-01-01",
    "commit": "0123456789abcdef",
    "machine": {"cores": 2, "processor": "A Processor", "abilities": ["avx2"]},
}


def test_figures_of_the_record_stand_beside_their_bounds_and_what_is_missing_is_left_out() -> None:
    assert rows_of(RECORD, EXACT) == [(EXACT["bitexact_pairs"], "at least 2,000", "2,100")]
    assert rows_of(RECORD, SPEED) == [(SPEED["memory_speed_1b"], "at least 0.7", "0.81")]
    assert "avx2" in " ".join(circumstances_of(RECORD))


def test_without_a_record_the_page_says_what_would_measure_it() -> None:
    assert "make proof-cpu" in TABLES["cpu-speed"]({})
    assert "0.81" in TABLES["cpu-speed"]({"proof-cpu": RECORD})
