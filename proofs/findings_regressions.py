"""What held before must hold now: all tests, and the quick proofs of the parts that all others stand on."""

import subprocess
import sys

from benchmarks.record import ROOT, say
from proofs.findings_suite import run_suite
from proofs.proof import Proof, section
from proofs.regressions import read_outcome

PROOFS = ("memory", "scheduler", "worker", "fleet")
PROOF_S = 3600.0


@section("regressions")
def regressions(proof: Proof) -> None:
    num_broken = 0
    for name in PROOFS:
        ran = subprocess.run(
            [sys.executable, "-m", f"proofs.{name}"], cwd=ROOT, capture_output=True, text=True, timeout=PROOF_S
        )
        outcome = read_outcome(name, ran)
        for key in sorted(outcome.broken):
            say(f"  broken: {name}: {key}: {outcome.figures.get(key)}")
        num_broken += len(outcome.broken)
    suite = run_suite() if proof.is_full else None
    if suite is not None:
        proof.equals("regressions_tests_failed", suite.num_failed, 0, f"of {suite.num_passed + suite.num_failed}")
        num_broken += suite.num_failed
    proof.equals("regressions", num_broken, 0, f"rows of {', '.join(PROOFS)}, quick; tests at full scale")
