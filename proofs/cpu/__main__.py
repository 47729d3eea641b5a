"""`make proof-cpu`: the CPU backend stands alone, with weights as files have them, at the memory's speed.

    install   the wheel in an empty environment: bytes, modules of torch, time to ready, memory
    kit       the backend's contract, and transformers' tokens
    bits      the same bits in any company, on any number of threads, on every instruction set
    formats   products of every format against float64
    quality   perplexity of formats, integer arithmetic and 8-bit KV
    memory    the 8B model: nothing written, held once, soon there
    speed     beside the memory, float32, neighbours
    sets      every instruction set that can be forced here: bits, speed, beside llama.cpp

Models: `make model`, `make model-coder`, `make bench-models`. Beside llama.cpp and OpenVINO GenAI: `make peers`.
"""

import sys

from proofs.cpu import bits, formats, install, kit, memory, quality, sets, speed
from proofs.framework.proof import run

ROOMS = (install, kit, bits, formats, quality, memory, speed, sets)
PATHS = ("src/quire/backends/cpu", "src/quire/backends/host", "src/quire/backends/kernels", "native")

if __name__ == "__main__":
    sys.exit(run("cpu", *ROOMS, paths=PATHS))
