"""Bugs put into the ways of requests and tokens one by one: do the tests notice each?"""

from proofs.framework.machinery import mutants
from proofs.framework.proof import Proof, section
from tests.mutants import ages, dialects, seam


@section("mutants")
def prove_mutants(proof: Proof) -> None:
    chosen = [*dialects.MUTANTS, *seam.MUTANTS, *ages.MUTANTS]
    tests = (*dialects.TESTS, *seam.TESTS, *ages.TESTS)
    mutants(proof, chosen if proof.is_full else chosen[::5], tests, at_least=proof.sized(quick=2, full=15))
