"""`make proof-capacity`: checks the fleet simulator, the search of `quire plan`, and the router of a fleet.

    router   the router alone: index size, events per second, time of a choice, spread of a burst
    plan     the search of `quire plan` compared with an exhaustive one
    traces   a public trace on one member compared with an independent replay, and policies on fleets
    real     the simulator compared with a real server
    fleets   equal seeds give equal logs; invariants under random faults; a thousand members, a million requests

It reads Mooncake's conversation trace from the folder `shared/data/traces` beside the checkout.
"""

import sys

from proofs.capacity import fleets, plan, real, router, traces
from proofs.framework.proof import run

PATHS = ("src/quire/sim", "src/quire/fleet/routing", "src/quire/core")

if __name__ == "__main__":
    sys.exit(run("capacity", router, traces, real, plan, fleets, paths=PATHS))
