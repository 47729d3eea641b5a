"""`make proof-fleet`: one gateway and many members, whose streams survive crashes of members. All sockets are real.

    equal       answers through two members compared with those of one server, with the real model
    moves       members killed in turn under streams, members drained in turn under load
    cost        what a gateway costs, and how soon a member knows that a client has left
    blocks      prefix hits of conversations, and a block index that stays correct when events are lost
    network     links that are down, slow, lossy, open in one direction only, or half open
    mutants     bugs injected one by one, which the tests of the fleet must notice
    intruders   wrong keys, no keys, replayed handshakes, foreign models, malformed messages
    strangers   a vLLM server as a member; `benchmarks/peers/install.sh vllm` installs it
    ray         Ray Serve starts, scales and updates members; QUIRE_RAY_PYTHON names a Python that has ray

Sections about text use SmolLM2, others oracles: members that compute nothing.
"""

import sys

from proofs.fleet import blocks, cost, equal, intruders, moves, network, ray, strangers
from proofs.framework.machinery import mutants_section
from proofs.framework.proof import run
from tests.mutants import fleet, fleet_port

PATHS = ("src/quire/fleet", "src/quire/worker", "src/quire/client")

if __name__ == "__main__":
    mutants = mutants_section(fleet, fleet_port, every=20, quick=7, full=120)
    sys.exit(run("fleet", equal, moves, cost, blocks, network, intruders, mutants, strangers, ray, paths=PATHS))
