"""`make proof-findings`: defects found by attacking a running server, each shown to be mended, over real sockets.

Every finding has a test in `tests/findings/`, named after it; what needs more than a test stands with its topic in
`findings_*.py`.
"""

import sys

from proofs import (
    findings_access,
    findings_alive,
    findings_endurance,
    findings_grammars,
    findings_limits,
    findings_lists,
    findings_members,
    findings_neighbours,
    findings_open,
    findings_promises,
    findings_queue,
    findings_reading,
    findings_requests,
    findings_steps,
    findings_templates,
    findings_terminal,
    findings_turns,
    findings_worker,
)
from proofs.proof import run

TOPICS = (
    findings_access,
    findings_templates,
    findings_terminal,
    findings_queue,
    findings_lists,
    findings_members,
    findings_neighbours,
    findings_reading,
    findings_grammars,
    findings_turns,
    findings_worker,
    findings_alive,
    findings_steps,
    findings_promises,
    findings_limits,
    findings_endurance,
    findings_requests,
    findings_open,
)

if __name__ == "__main__":
    sys.exit(run("findings", *TOPICS))
