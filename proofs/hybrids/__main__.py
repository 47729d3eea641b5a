"""`make proof-hybrids`: recurrent state beside the blocks, and a prefix cache that knows both.

    memory     slots under random operations, state machines, a reference, mutants and the simulation
    parity     every hybrid's tokens against transformers, from safetensors and from GGUF files
    bits       the same bits in any circumstance: cut anywhere, from kept states, forked, after a kill
    budgets    slots within a memory budget
    speed      a hybrid beside the memory's speed

Models: `make model`; the large hybrid is made by the proof.
"""

import sys

from proofs.framework.proof import run
from proofs.hybrids import bits, budgets, memory, parity, speed

ROOMS = (memory, parity, bits, budgets, speed)


PATHS = ("src/quire/backends", "src/quire/core", "src/quire/checkpoints", "native")

if __name__ == "__main__":
    sys.exit(run("hybrids", *ROOMS, paths=PATHS))
