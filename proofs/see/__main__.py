"""`make proof-see`: explanations of cache misses, and the views of a running server, each only for its owner.

    explain     every cache miss has its right reason, token position and part of the conversation
    leaks       no tenant learns anything of another tenant from explanations
    guard       prompt lines that prevent cache hits are found, without false alarms
    watch       the cost of the watch stream, and no snapshots while it has no reader
    dashboard   the dashboard in a browser, with a server under load
    top         what only the operator may see, and how `quire top` shows it
    replay      traces of servers under load, whose steps are planned again

Full runs save their screenshots under docs/images.
"""

import sys

from proofs.framework.proof import run
from proofs.see import dashboard, explain, guard, leaks, replay, top, watch

PATHS = (
    "src/quire/api",
    "src/quire/cli",
    "src/quire/client",
    "src/quire/engine",
    "src/quire/core",
    "src/quire/observe",
    "src/quire/sim",
)

if __name__ == "__main__":
    sys.exit(run("see", explain, leaks, guard, watch, dashboard, top, replay, paths=PATHS))
