"""What is wanted, where: results of several tokens change no answer. That runners keep the contract, and that recorded
runs are planned as they were, is tested (`tests/conformance`, `tests/sim/test_golden.py`)."""

from proofs.core.scheduler import simulated
from proofs.framework.proof import Proof, section


@section("several tokens in a result")
def prove_simulations(proof: Proof) -> None:
    """Whole lives of servers that guess ahead: every client gets what it would have got alone."""
    runs = simulated(proof, proof.sized(quick=40, full=2_000), "drafts")
    num_right = sum(one.totals.num_accepted_tokens for one in runs)
    proof.at_least("sim_right_drafts", num_right, 1)
    proof.at_least("sim_wrong_drafts", sum(one.totals.num_draft_tokens for one in runs) - num_right, 1)
    proof.equals("sim_divergences", sum(bool(one.story) for one in runs), 0)
