"""`make proof-findings`: defects found by attacking a running server, each shown to be fixed, over real sockets.

Each finding has a test in `tests/findings/`, named after it. This folder has the checks that are too long
for a test, by topic.
"""

import sys

from proofs.findings import (
    access,
    endurance,
    grammars,
    limits,
    lists,
    promises,
    queue,
    reading,
    requests,
    templates,
    terminal,
    turns,
    worker,
)
from proofs.findings.alive import steps, surfaces
from proofs.findings.members import members
from proofs.findings.neighbours import neighbours
from proofs.findings.open import still_open
from proofs.framework.proof import run

TOPICS = (
    access,
    templates,
    terminal,
    queue,
    lists,
    members,
    neighbours,
    reading,
    grammars,
    turns,
    worker,
    surfaces,
    steps,
    promises,
    limits,
    endurance,
    requests,
    still_open,
)

PATHS = ("src", "native")

if __name__ == "__main__":
    sys.exit(run("findings", *TOPICS, paths=PATHS))
