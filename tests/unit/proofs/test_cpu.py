"""What proof-cpu's own judgements are made of: references, digests, the tally, memory of processes."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from proofs.cpu import neon as cpu_neon
from proofs.cpu.bits import Tally
from proofs.cpu.install import IMPORTED, bytes_in, held_bytes
from proofs.cpu.references import AWQ_PLACES, REFERENCES, e4m3, words_of


def test_words_have_the_lowest_bits_first_and_places_say_which_code_stands_where() -> None:
    codes = np.arange(8)[None]
    assert words_of(codes, 4).view(np.uint32)[0, 0] == 0x76543210
    assert words_of(codes, 4, AWQ_PLACES).view(np.uint32)[0, 0] == 0x75316420
    assert words_of(np.array([[1, 2, 3, 4, 5]]), 8).view(np.uint32).tolist() == [[0x04030201, 0x00000005]]


@pytest.mark.parametrize(
    ("code", "number"), [(0x00, 0.0), (0x01, 2.0**-9), (0x38, 1.0), (0x7E, 448.0), (0xB8, -1.0), (0x08, 2.0**-6)]
)
def test_bytes_of_e4m3_stand_for_the_numbers_of_the_specification(code: int, number: float) -> None:
    assert e4m3(code) == number


@pytest.mark.parametrize("name", sorted(REFERENCES))
def test_a_reference_has_a_number_for_every_weight(name: str) -> None:
    made = REFERENCES[name](24, 256, np.random.default_rng(1))
    assert made.numbers.shape == (24, 256)
    assert made.numbers.dtype == np.float64
    assert np.isfinite(made.numbers).all()
    assert made.numbers.any()


def test_builds_are_compared_with_the_portable_one_of_this_machine() -> None:
    own = ["portable q4_0 0 aa", "avx2 q4_0 0 aa", "avx2 q4_0 1 bb", "portable q4_0 1 cc"]
    found = cpu_neon.compare({"own": own, "neon": ["portable q4_0 0 aa", "neondot q4_0 0 ab"]})
    assert found.pairs == 4
    assert found.wrong == ["own avx2: q4_0 1", "neon neondot: q4_0 0"]
    assert "neon neondot" in found.builds


def test_a_product_that_the_portable_build_does_not_have_is_wrong() -> None:
    found = cpu_neon.compare({"own": ["portable q4_0 0 aa"], "neon": ["portable q4_0 1 aa"]})
    assert found.wrong == ["neon portable: q4_0 1"]


def test_what_is_missing_is_told_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert cpu_neon.PACKAGES in cpu_neon.missing()
    assert cpu_neon.main() == 0


def test_pairs_count_once_in_all_and_once_under_each_of_their_names() -> None:
    tally = Tally()
    tally.add(("Q4_0 FLOAT", "threads 2"), 5, 0)
    tally.add(("Q4_0 FLOAT",), 3, 1)
    assert (tally.counts["all"], tally.counts["Q4_0 FLOAT"], tally.counts["threads 2"], tally.wrong) == (8, 8, 5, 1)


def test_imports_of_torch_are_found_in_what_python_says_of_imports() -> None:
    command = [sys.executable, "-X", "importtime", "-c", "import sys; sys.modules['torch'] = sys; import json"]
    assert IMPORTED.findall(subprocess.run(command, capture_output=True, text=True).stderr) == []
    said = "".join(
        f"import time:       312 |     445123 |   {name}\n" for name in ("torch.nn", "torchless", "quire.torch")
    )
    assert IMPORTED.findall(said) == ["torch.nn"]


def test_links_are_counted_once(tmp_path: Path) -> None:
    (tmp_path / "one").write_bytes(b"x" * 8192)
    once = bytes_in(tmp_path)
    os.link(tmp_path / "one", tmp_path / "two")
    assert bytes_in(tmp_path) == once > 0


def test_memory_of_a_process_is_found_by_its_group() -> None:
    command = [sys.executable, "-c", "print('runs', flush=True); input()"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"runs\n"
        assert held_bytes(process.pid) > 100_000
    finally:
        process.communicate(b"\n")
