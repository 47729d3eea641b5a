"""`make proof-seam`: hops between a client and the device, a dialect's own bytes, a wider seam.

The sections stand with their topics in `seam_*.py`.
"""

import sys

from proofs import seam_dialects, seam_hops, seam_mutants, seam_wanted
from proofs.proof import run

if __name__ == "__main__":
    sys.exit(run("seam", seam_dialects, seam_wanted, seam_hops, seam_mutants))
