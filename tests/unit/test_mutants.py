"""The list of hand-written bugs still fits the source. That the tests catch them is shown by the proofs."""

import ast

import pytest

from tests.mutants import memory, scheduler
from tests.mutants.kill import SOURCE, Mutant

MUTANTS = [*memory.MUTANTS, *scheduler.MUTANTS]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_every_mutant_applies_once_and_is_still_python(mutant: Mutant) -> None:
    text = (SOURCE / mutant.file).read_text()
    changed = mutant.applied_to(text)
    assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(text))


def test_no_two_mutants_have_the_same_name() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
