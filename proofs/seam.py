"""`make proof-seam`: fewer hops between a client and the device, a dialect's own bytes, a wider seam, and their cost.

The sections stand with their topics in `seam_*.py`.
"""

import sys

from proofs import seam_cost, seam_dialects, seam_hops, seam_overlap, seam_wanted
from proofs.proof import run
from proofs.regressions import rows_lost_since
from proofs.seam_hops import SEAM

if __name__ == "__main__":
    sys.exit(run("seam", seam_dialects, seam_wanted, seam_hops, seam_overlap, seam_cost, rows_lost_since(SEAM)))
