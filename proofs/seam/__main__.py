"""`make proof-seam`: hops between a client and the device, a dialect's own bytes, a wider seam.

The sections stand with their topics in this folder.
"""

import sys

from proofs.framework.machinery import mutants_section
from proofs.framework.proof import run
from proofs.seam import dialects, hops, wanted
from tests.mutants import ages, seam
from tests.mutants import dialects as dialect_mutants

PATHS = ("src/quire/api", "src/quire/client", "src/quire/worker", "src/quire/engine", "src/quire/core")

if __name__ == "__main__":
    mutants = mutants_section(dialect_mutants, seam, ages, every=5, quick=2, full=15)
    sys.exit(run("seam", dialects, wanted, hops, mutants, paths=PATHS))
