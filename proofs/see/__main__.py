"""`make proof-see`: why a prefix missed, and what happens inside, for those who may know it.

    explain     every miss has its reason, its token and its part of the conversation
    leaks       nobody learns of anybody else by any of it
    guard       lines that keep prompts out of the cache are found, and nothing else is
    watch       what it costs to look, and that nothing is made while nobody does
    dashboard   the dashboard in a browser, before a server under load
    top         what the operator alone may see, and what `quire top` makes of it
    replay      traces of servers under load, planned again

Full runs keep their pictures under docs/images.
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
