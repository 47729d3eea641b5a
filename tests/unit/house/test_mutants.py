"""The list of hand-written bugs still fits the source, and one of each kind is caught; the proofs catch them all."""

import ast

import pytest

from tests.mutants import ages, dialects, fleet, fleet_port, guesses, memory, mlx, scheduler, seam, slots
from tests.mutants.kill import SOURCE, Mutant, survivors

LISTS = (memory, scheduler, dialects, seam, ages, guesses, slots, mlx, fleet, fleet_port)
MUTANTS = [mutant for module in LISTS for mutant in module.MUTANTS]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_every_mutant_applies_once_and_is_still_python(mutant: Mutant) -> None:
    text = (SOURCE / mutant.file).read_text()
    changed = mutant.applied_to(text)
    assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(text))


def test_no_two_mutants_have_the_same_name() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)


def test_one_mutant_of_each_kind_is_killed_and_a_copy_without_a_bug_is_not() -> None:
    tests = ("tests/unit/core/memory/test_block_pool.py", "tests/unit/core/scheduling/test_waiting_queue.py")
    of_memory, of_scheduler = memory.MUTANTS[0], scheduler.MUTANTS[0]
    harmless = Mutant("a word of a docstring", "workload/__init__.py", "Seeded load:", "Load:")
    assert survivors([of_memory, of_scheduler, harmless], tests) == [harmless.name]
