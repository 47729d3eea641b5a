"""`make proof-capacity`: how many machines, which settings: the simulator on real traces, and the router of a fleet.

    router   the pure router: bursts, choices, entries, events
    plan     the search of `quire plan` beside an exhaustive one
    traces   a public trace on one member beside an independent replay, and policies on fleets
    real     the simulator beside a real server
    fleets   one seed, one log; invariants in storms; a thousand members and a million requests

Traces: Mooncake's conversation trace in a folder `shared/data/traces` beside the checkout.
"""

import sys

from proofs.capacity import fleets, plan, real, router, traces
from proofs.framework.proof import run

PATHS = ("src/quire/sim", "src/quire/fleet/routing", "src/quire/core")

if __name__ == "__main__":
    sys.exit(run("capacity", router, traces, real, plan, fleets, paths=PATHS))
