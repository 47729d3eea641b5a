"""State slots within a memory budget, each in a process of its own, which says what it held at most."""

from benchmarks.record import say
from benchmarks.steps import GIB
from proofs.framework.machinery import told_by_child
from proofs.framework.proof import Proof, section
from tests.support.models import architectures

LEAST_GIB, MOST_GIB = 0.28, 0.75
MOST_SHARE = 1.05


@section("budgets")
def budgets(proof: Proof) -> None:
    """Loaded, filled until states make room for each other, and never beyond what was given; or refused in words."""
    directory, over, worst = architectures.directory("hybrid-wide"), 0, 0.0
    started = lowered = refused = 0
    count = proof.sized(quick=3, full=40)
    for at in range(count):
        budget, max_running = int(proof.random.uniform(LEAST_GIB, MOST_GIB) * GIB), proof.random.choice((2, 8, 32))
        told = told_by_child("tests.support.models.hybrid_loading", directory, budget, max_running)
        if told is None:
            over += 1
            continue
        share = told["peak_bytes"] / budget
        if told["is_started"]:
            started += 1
            lowered += told["is_lowered"]
            worst = max(worst, share)
            over += share > MOST_SHARE or not told["is_full"] or not told["is_told"]
        else:
            refused += 1
            over += not told["sentence"]
        if at < 3 or share > 1.0 or not told.get("is_full", True):
            say(f"  budget {budget / GIB:.2f} GiB, {max_running} to run: {told}")
    proof.report("budgets", count)
    proof.at_least("budgets_started", started, proof.sized(quick=1, full=20))
    proof.report("budgets_refused", refused)
    proof.at_least("budgets_lowered", lowered, proof.sized(quick=0, full=1), "fewer run than were asked for")
    proof.at_most("budget_worst_share", worst, MOST_SHARE)
    proof.equals("over_budget", over, 0)
