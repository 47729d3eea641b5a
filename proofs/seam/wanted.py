"""Results of several tokens per step change no answer, in simulated servers. The contract of runners and the plans of
recorded runs are tested elsewhere (`tests/conformance`, `tests/sim/test_golden.py`)."""

from proofs.core.scheduler import run_simulations
from proofs.framework.proof import Proof, section


@section("several tokens in a result")
def prove_simulations(proof: Proof) -> None:
    """Simulate servers with speculative tokens: every client must get the same answer as without other clients."""
    runs = run_simulations(proof, proof.sized(quick=40, full=2_000), "drafts")
    num_right = sum(one.totals.num_accepted_tokens for one in runs)
    proof.at_least("sim_right_drafts", num_right, 1)
    proof.at_least("sim_wrong_drafts", sum(one.totals.num_draft_tokens for one in runs) - num_right, 1)
    proof.equals("sim_divergences", sum(bool(one.failure) for one in runs), 0)
