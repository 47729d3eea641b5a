"""Proofs stand above measurements, and neither leans on a test."""

import re
from pathlib import Path

import pytest

from benchmarks.record import ROOT

IMPORTED = re.compile(r"^\s*(?:from|import) ([\w.]+)", re.MULTILINE)
FORBIDDEN = {
    "benchmarks": r"proofs(\.|$)|tests\.(?!support)",
    "proofs": r"tests\.(?!support|mutants)",
}


@pytest.mark.parametrize("folder", FORBIDDEN)
def test_measurements_import_no_proof_and_nothing_imports_a_test(folder: str) -> None:
    paths = sorted((ROOT / folder).rglob("*.py"))
    assert len(paths) > 10
    found = [(path.name, name) for path in paths for name in imported(path) if re.match(FORBIDDEN[folder], name)]
    assert found == []


def imported(path: Path) -> list[str]:
    return IMPORTED.findall(path.read_text())
