"""What it would give to prepare the next plan while the device works, on this backend, at 1 and 64 rows.

    one after the other    a step of the real model, then a step's worth of planning and applying
    at once                the same two, the second in a thread

The planning is real too: an engine with as many rows whose runner answers at once. Everything that could ever be
overlapped is in it, so the gain is told rather too large than too small: a next plan needs the tokens of this one for
part of its work. Both ways take turns.
"""

from concurrent.futures import ThreadPoolExecutor
from statistics import median

from benchmarks.steps import decoding, in_turn, smollm2_model, timed
from proofs.proof import Proof, section
from tests.support.models import Machine

CONTEXT = 288


@section("overlap")
def overlap(proof: Proof) -> None:
    """Measured to decide, not bounded."""
    rounds = proof.sized(quick=15, full=40)
    for num_rows in (1, 64):
        model = smollm2_model()
        real, planning = decoding(model, num_rows, CONTEXT), decoding(model, num_rows, CONTEXT, computes=False)
        with ThreadPoolExecutor(1) as beside:

            def in_order(real: Machine = real, planning: Machine = planning) -> None:
                real.step()
                planning.step()

            def at_once(
                real: Machine = real, planning: Machine = planning, beside: ThreadPoolExecutor = beside
            ) -> None:
                planned = beside.submit(planning.step)
                real.step()
                planned.result()

            host_s = median(timed(planning.step) for _ in range(rounds))
            taken = in_turn({"in_order": in_order, "at_once": at_once}, rounds)
        ordered_s, once_s = median(taken["in_order"]), median(taken["at_once"])
        told = f"{ordered_s * 1e3:.2f} and {once_s * 1e3:.2f} ms a step"
        proof.report(f"overlap_host_ms_{num_rows}", host_s * 1e3, "plan and apply")
        proof.report(f"overlap_gain_{num_rows}", ordered_s / once_s - 1.0, told)
