"""`make proof-hybrids`: recurrent state beside the blocks, and a prefix cache that knows both.

    hybrids_memory     slots under random operations, state machines, a reference, mutants and the simulation
    hybrids_parity     every hybrid's tokens against transformers, from safetensors and from GGUF files
    hybrids_bits       the same bits in any circumstance: cut anywhere, from kept states, forked, after a kill
    hybrids_budgets    slots within a memory budget
    hybrids_speed      a hybrid beside the memory's speed

Models: `make model`; the large hybrid is made by the proof.
"""

import sys

from proofs import hybrids_bits, hybrids_budgets, hybrids_memory, hybrids_parity, hybrids_speed
from proofs.proof import run

ROOMS = (hybrids_memory, hybrids_parity, hybrids_bits, hybrids_budgets, hybrids_speed)


if __name__ == "__main__":
    sys.exit(run("hybrids", *ROOMS))
