"""What the proof of the house counts in tests: sentences, private members, dotted paths."""

import ast
from collections.abc import Callable, Iterator

import pytest

from proofs.house import coupling


@pytest.mark.parametrize(
    ("count", "code", "number"),
    [
        (coupling.prose_matches, 'pytest.raises(KeyError, match="no block")', 1),
        (coupling.prose_matches, 'pytest.raises(KeyError, match=f"no block {at}")', 1),
        (coupling.prose_matches, 'assert "no block" in str(error.value)', 1),
        (coupling.prose_matches, "pytest.raises(KeyError)", 0),
        (coupling.prose_matches, 'assert error.value.code == "no_block"', 0),
        (coupling.private_uses, "memory._blocks.clear()", 1),
        (coupling.private_uses, "Memory()._blocks", 1),
        (coupling.private_uses, "from quire.core import _helper, Public", 1),
        (coupling.private_uses, "self._blocks = cls._number", 0),
        (coupling.private_uses, "memory.__class__", 0),
        (coupling.dotted_patches, 'monkeypatch.setattr("quire.core.LIMIT", 3)', 1),
        (coupling.dotted_patches, 'monkeypatch.setattr(core, "LIMIT", 3)', 0),
    ],
)
def test_what_ties_a_test_to_an_inner_part_is_counted(
    count: Callable[[ast.AST], Iterator[coupling.Place]], code: str, number: int
) -> None:
    assert len(list(count(ast.parse(code)))) == number
