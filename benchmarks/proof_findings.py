"""`make proof-findings`: defects found by attacking a running server, each shown to be mended, over real sockets.

The sections live with their topics in `findings_*.py`; this is their order.
"""

import sys

from benchmarks import (
    findings_doors,
    findings_lists,
    findings_promises,
    findings_queue,
    findings_suite,
    findings_templates,
    findings_worker,
)
from benchmarks.findings import BEFORE, findings_open
from benchmarks.proof import Proof, run
from benchmarks.regressions import PROOFS, regressions

TOPICS = (
    findings_doors,
    findings_templates,
    findings_queue,
    findings_lists,
    findings_worker,
    findings_promises,
    findings_suite,
)
QUICK_PROOFS = ("memory", "scheduler", "engine")
"""Other proofs that a quick run looks at; a full run looks at all."""


def prove(proof: Proof) -> None:
    names = PROOFS if proof.is_full else QUICK_PROOFS
    proof.run_sections(
        [
            ("findings", lambda: findings_open(proof)),
            *(section for topic in TOPICS for section in topic.sections(proof)),
            ("regressions", lambda: regressions(proof, BEFORE, names)),
        ]
    )


if __name__ == "__main__":
    sys.exit(run("findings", prove))
