"""What a test file needs is read from its imports, so that nobody has to mark it."""

from pathlib import Path

import pytest

from tests.support.machine import needs

TESTS = Path(__file__).parents[2]


def test_the_core_is_tested_without_third_party_packages_but_those_of_the_tests() -> None:
    files = [*(TESTS / "unit" / "core").glob("test_*.py"), TESTS / "conformance" / "test_oracle.py"]
    packages = {name.partition(".")[0] for file in files for name in needs.needs(file)}
    assert files
    assert not packages & {"torch", "numpy", "tokenizers", "zmq"}


def test_a_need_is_found_through_what_a_file_imports() -> None:
    assert {"torch", "transformers"} <= needs.needs(TESTS / "conformance" / "test_torch.py")
    assert "zmq.asyncio" in needs.needs(TESTS / "unit" / "worker" / "test_supervisor.py")
    assert "zmq.asyncio" not in needs.needs(TESTS / "property" / "test_ledger.py")


def test_what_is_not_installed_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(needs, "_is_installed", lambda package: package != "torch")
    assert needs.missing(TESTS / "unit" / "backends" / "torch" / "test_attention.py") == ["torch"]
    assert needs.missing(TESTS / "conformance" / "test_oracle.py") == []


def test_a_test_whose_needs_are_met_is_not_skipped(request: pytest.FixtureRequest) -> None:
    assert request.node.get_closest_marker("skip") is None
    assert request.node.get_closest_marker("skipif") is None
