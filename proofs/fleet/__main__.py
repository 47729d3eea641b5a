"""`make proof-fleet`: one gateway, many members, and streams that outlive their machines. Real sockets throughout.

    equal       answers through two members beside those of one server, with the real model
    moves       members killed in turn under streams, members drained in turn under load
    cost        what a gateway costs, and how soon a member knows that a client has left
    blocks      prefixes that are found again, and an index that is the truth whatever is lost
    network     links that are down, slow, lossy, deaf in one direction or half open
    mutants     bugs put in one by one, which the tests of the fleet must notice
    intruders   wrong keys, no keys, handshakes said again, foreign models, bytes that are no messages
    strangers   a vLLM server as a member; `benchmarks/peers/install.sh vllm` installs it
    ray         Ray Serve starts, scales and updates members; QUIRE_RAY_PYTHON names a Python that has ray

Oracles where counts matter, SmolLM2 where text does.
"""

import sys

from proofs.fleet import blocks, cost, equal, intruders, moves, network, ray, strangers
from proofs.framework.machinery import mutants_section
from proofs.framework.proof import run
from tests.mutants import fleet, fleet_port

PATHS = ("src/quire/fleet", "src/quire/worker", "src/quire/client")

if __name__ == "__main__":
    here = (
        equal,
        moves,
        cost,
        blocks,
        network,
        intruders,
        mutants_section(fleet, fleet_port, every=20, quick=7, full=120),
    )
    sys.exit(run("fleet", *here, strangers, ray, paths=PATHS))
