"""`make proof-seam`: hops between a client and the device, a dialect's own bytes, a wider seam.

The sections stand with their topics in this folder.
"""

import sys

from proofs.framework.proof import run
from proofs.seam import dialects, hops, mutants, wanted

PATHS = ("src/quire/api", "src/quire/client", "src/quire/worker", "src/quire/engine", "src/quire/core")

if __name__ == "__main__":
    sys.exit(run("seam", dialects, wanted, hops, mutants, paths=PATHS))
