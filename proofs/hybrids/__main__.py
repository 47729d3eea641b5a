"""`make proof-hybrids`: models with recurrent layers, whose prefix cache has state slots beside the KV blocks.

    memory     slots under random operations, state machines, a reference, mutants and the simulation
    parity     every hybrid's tokens against transformers, from safetensors and from GGUF files
    bits       the same bits in any circumstance: in chunks, from saved states, forked, after a crash
    budgets    slots within a memory budget
    speed      decode and prefill of a large hybrid, relative to memory bandwidth

It needs the models of `make model`, and generates the large hybrid itself.
"""

import sys

from proofs.framework.proof import run
from proofs.hybrids import bits, budgets, memory, parity, speed

PARTS = (memory, parity, bits, budgets, speed)


PATHS = ("src/quire/backends", "src/quire/core", "src/quire/checkpoints", "native")

if __name__ == "__main__":
    sys.exit(run("hybrids", *PARTS, paths=PATHS))
