"""Bugs put into the router, the port and the desk one by one: do the tests of the fleet notice each?"""

from proofs.framework.machinery import mutants
from proofs.framework.proof import Proof, section
from tests.mutants import fleet, fleet_port


@section("mutants")
def prove_mutants(proof: Proof) -> None:
    router, port = (one.MUTANTS if proof.is_full else one.MUTANTS[::20] for one in (fleet, fleet_port))
    mutants(proof, [*router, *port], (*fleet.TESTS, *fleet_port.TESTS), at_least=proof.sized(quick=7, full=120))
