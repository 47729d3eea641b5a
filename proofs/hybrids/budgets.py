"""State slots within a memory budget: each budget is tried in a separate process, which reports its peak memory."""

from benchmarks.record import say
from benchmarks.steps import GIB
from proofs.framework.machinery import json_from_child
from proofs.framework.proof import Proof, section
from tests.support.models import architectures

MIN_GIB, MAX_GIB = 0.28, 0.75
MAX_SHARE = 1.05


@section("budgets")
def budgets(proof: Proof) -> None:
    """Load a model and fill its slots until states are evicted, within the budget; or the load fails with a message."""
    directory, num_over, max_share = architectures.directory("hybrid-wide"), 0, 0.0
    num_started = num_lowered = num_refused = 0
    count = proof.sized(quick=3, full=40)
    for index in range(count):
        budget, max_running = int(proof.random.uniform(MIN_GIB, MAX_GIB) * GIB), proof.random.choice((2, 8, 32))
        report = json_from_child("tests.support.models.hybrid_loading", directory, budget, max_running)
        if report is None:
            num_over += 1
            continue
        share = report["peak_bytes"] / budget
        if report["is_started"]:
            num_started += 1
            num_lowered += report["is_lowered"]
            max_share = max(max_share, share)
            num_over += share > MAX_SHARE or not report["is_full"] or not report["is_told"]
        else:
            num_refused += 1
            num_over += not report["sentence"]
        if index < 3 or share > 1.0 or not report.get("is_full", True):
            say(f"  budget {budget / GIB:.2f} GiB, {max_running} to run: {report}")
    proof.report("budgets", count)
    proof.at_least("budgets_started", num_started, proof.sized(quick=1, full=20))
    proof.report("budgets_refused", num_refused)
    proof.at_least("budgets_lowered", num_lowered, proof.sized(quick=0, full=1), "fewer run than requested")
    proof.at_most("budget_worst_share", max_share, MAX_SHARE)
    proof.equals("over_budget", num_over, 0)
