"""`make proof-capacity`: how many machines, which settings: the simulator on real traces, and the router of a fleet.

    capacity_router   the pure router: bursts, choices, entries, events
    capacity_plan     the search of `quire plan` beside an exhaustive one
    capacity_traces   a public trace on one member beside an independent replay, and policies on fleets
    capacity_real     the simulator beside a real server
    capacity_fleets   one seed, one log; invariants in storms; a thousand members and a million requests

Traces: Mooncake's conversation trace in a folder `shared/data/traces` beside the checkout.
"""

import sys

from proofs import capacity_fleets, capacity_plan, capacity_real, capacity_router, capacity_traces
from proofs.proof import run

if __name__ == "__main__":
    sys.exit(run("capacity", capacity_router, capacity_traces, capacity_real, capacity_plan, capacity_fleets))
