"""The list of hand-written bugs still fits the source, and one of each kind is caught; the proofs catch them all."""

import ast
from types import ModuleType

import pytest

from tests.mutants import ages, dialects, fleet, fleet_port, guesses, memory, mlx, scheduler, seam, slots
from tests.mutants.kill import ROOT, SOURCE, Mutant, survivors

LISTS = (memory, scheduler, dialects, seam, ages, guesses, slots, mlx, fleet, fleet_port)
MUTANTS = [mutant for module in LISTS for mutant in module.MUTANTS]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_every_mutant_applies_once_and_is_still_python(mutant: Mutant) -> None:
    text = (SOURCE / mutant.file).read_text()
    changed = mutant.applied_to(text)
    assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(text))


def test_a_mutant_is_found_by_its_function_whatever_stands_elsewhere() -> None:
    text = "class A:\n    def one(self):\n        x = 1\n\n    def two(self):\n        if 1:\n            x  =  1\n"
    of_two = Mutant("a name", "file.py", "A.two", "x = 1", "y = 1\nx = 2")
    assert of_two.applied_to(text) == text.replace("x  =  1", "y = 1\n            x = 2")


@pytest.mark.parametrize(("function", "old"), [("A.one", "x"), ("A.one", "z"), ("A.three", "x = x")])
def test_a_text_that_stands_twice_or_nowhere_and_a_function_that_is_gone_are_refused(function: str, old: str) -> None:
    with pytest.raises(LookupError):
        Mutant("a name", "file.py", function, old, "y").applied_to("class A:\n    def one(self):\n        x = x\n")


@pytest.mark.parametrize("module", LISTS)
def test_the_tests_that_catch_mutants_are_there(module: ModuleType) -> None:
    assert [test for test in module.TESTS if not (ROOT / test.partition("::")[0]).exists()] == []


def test_no_two_mutants_have_the_same_name() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)


def test_one_mutant_of_each_kind_is_killed_and_a_copy_without_a_bug_is_not() -> None:
    tests = ("tests/unit/core/memory/test_block_pool.py", "tests/unit/core/scheduling/test_waiting_queue.py")
    of_memory, of_scheduler = memory.MUTANTS[0], scheduler.MUTANTS[0]
    harmless = Mutant("a word of a docstring", "core/digests.py", "Namespace", "except tokens", "besides tokens")
    assert survivors([of_memory, of_scheduler, harmless], tests) == [harmless.name]
