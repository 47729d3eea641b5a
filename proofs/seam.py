"""`make proof-seam`: fewer hops between a client and the device, a dialect's own bytes, a wider seam.

The sections stand with their topics in `seam_*.py`.
"""

import sys

from proofs import seam_hops
from proofs.proof import run

if __name__ == "__main__":
    sys.exit(run("seam", seam_hops))
