"""`make proof-fleet`: one gateway, many members, and streams that outlive their machines. Real sockets throughout.

    fleet_equal       answers through two members beside those of one server, with the real model
    fleet_moves       members killed in turn under streams, members drained in turn under load
    fleet_cost        what a gateway costs, and how soon a member knows that a client has left
    fleet_blocks      prefixes that are found again, and an index that is the truth whatever is lost
    fleet_network     links that are down, slow, lossy, deaf in one direction or half open
    fleet_mutants     bugs put in one by one, which the tests of the fleet must notice
    fleet_intruders   wrong keys, no keys, handshakes said again, foreign models, bytes that are no messages
    fleet_strangers   a vLLM server as a member; `benchmarks/peers/install.sh vllm` installs it
    fleet_ray         Ray Serve starts, scales and updates members; QUIRE_RAY_PYTHON names a Python that has ray

Oracles where counts matter, SmolLM2 where text does.
"""

import sys

from proofs import (
    fleet_blocks,
    fleet_cost,
    fleet_equal,
    fleet_intruders,
    fleet_moves,
    fleet_mutants,
    fleet_network,
    fleet_ray,
    fleet_strangers,
)
from proofs.proof import run

if __name__ == "__main__":
    here = (fleet_equal, fleet_moves, fleet_cost, fleet_blocks, fleet_network, fleet_intruders, fleet_mutants)
    sys.exit(run("fleet", *here, fleet_strangers, fleet_ray))
