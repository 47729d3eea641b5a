"""`make proof-seam`: function calls between a client and the device, and results of several tokens per step.

`hops` counts the calls of one request on a real server; `wanted` checks simulated servers with speculative tokens.
"""

import sys

from proofs.framework.machinery import mutants_section
from proofs.framework.proof import run
from proofs.seam import hops, wanted
from tests.mutants import ages, dialects, seam

PATHS = ("src/quire/api", "src/quire/client", "src/quire/worker", "src/quire/engine", "src/quire/core")

if __name__ == "__main__":
    mutants = mutants_section(dialects, seam, ages, every=5, quick=2, full=15)
    sys.exit(run("seam", wanted, hops, mutants, paths=PATHS))
